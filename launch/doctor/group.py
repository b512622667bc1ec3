"""The hosts that doctor checks: they connect to a store on one of them and exchange JSON."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not re-exported

from thinpipe.launch.host.interfaces import format_endpoint
from thinpipe.launch.host.packages import first_line
from thinpipe.launch.net.ranks.network import HostNetwork


class DoctorError(RuntimeError):
    """The hosts cannot be checked; the message has the remedy."""


@dataclass(frozen=True)
class HostGroup:
    """All hosts, connected; `index` is this one's, in the order of addresses as in a run."""

    store: TCPStore
    index: int
    hosts: int
    is_server: bool
    wait_s: float

    def gather(self, key: str, value: Any, wait_s: float | None = None) -> list[Any]:
        self.publish(f"{key}/{self.index}", value)
        return [self.wait_for(f"{key}/{index}", wait_s) for index in range(self.hosts)]

    def close(self) -> None:
        """Leave the group; the host of the store waits until the others have left."""
        self.gather("done", True)
        self.publish(f"left/{self.index}", True)
        for index in range(self.hosts if self.is_server else 0):
            self.wait_for(f"left/{index}")

    def publish(self, key: str, value: Any) -> None:
        """Publish a value once.

        Raises:
            DoctorError: the host of the store is gone.
        """
        with _name_lost_host(f"publishing {key!r}"):
            self.store.set(key, json.dumps(value))

    def wait_for(self, key: str, wait_s: float | None = None) -> Any:
        """Wait for a value.

        Raises:
            DoctorError: the value was not published in time.
        """
        with _name_lost_host(f"waiting for {key!r}"):
            self.store.wait([key], timedelta(seconds=wait_s or self.wait_s))
            return json.loads(self.store.get(key))


def join_group(network: HostNetwork, hosts: int, *, wait_s: float) -> HostGroup:
    """Wait until all hosts have come to the store of their network.

    Raises:
        DoctorError: the store cannot be reached, or a host did not join in time.
    """
    where = network.endpoint or format_endpoint(*network.store)
    is_server = network.server is not None
    store = _open(network, wait_s)
    with _name_lost_host(f"waiting for hosts to join at {where}"):
        number = store.add("joined", 1) - 1
        mine = [network.order, network.name, socket.gethostname()]
        store.set(f"host/{number}", json.dumps(mine))
        _until(lambda: store.add("joined", 0) >= hosts, wait_s)
        joined = store.add("joined", 0)
        if joined != hosts:
            raise DoctorError(
                f"{joined} of {hosts} hosts joined at {where} within {wait_s:.0f} s; "
                f"start doctor with the same --nnodes on every host at about the same time"
            )
        everyone = sorted(json.loads(store.get(f"host/{n}")) for n in range(hosts))
    return HostGroup(store, everyone.index(mine), hosts, is_server, wait_s)


@contextlib.contextmanager
def _name_lost_host(doing: str) -> Iterator[None]:
    try:
        yield
    except DoctorError:
        raise
    except RuntimeError as error:
        raise DoctorError(
            f"lost another host while {doing} ({first_line(error)}); see its output, "
            "and start doctor again on all hosts"
        ) from None


def _open(network: HostNetwork, wait_s: float) -> TCPStore:
    """The store, which this process serves if it was the first at its address."""
    if network.server is None and network.overlay is None:
        _reach(*network.store, wait_s)
    try:
        return network.open_store(wait_s)
    except RuntimeError as error:
        where = format_endpoint(*network.store)
        raise DoctorError(f"{where}: {first_line(error)}") from None


def _reach(address: str, port: int, wait_s: float) -> None:
    reason = ""

    def connected() -> bool:
        nonlocal reason
        try:
            socket.create_connection((address, port), timeout=2).close()
        except TimeoutError:
            reason = (
                "no answer, perhaps because of a firewall; open the port there "
                f"(ufw allow {port}/tcp, or firewall-cmd --add-port {port}/tcp)"
            )
        except OSError as error:
            reason = (
                f"{error.strerror}; is doctor running there with the same --rdzv, and is the port "
                f"open (ufw allow {port}/tcp)?"
            )
        else:
            return True
        return False

    if not _until(connected, wait_s):
        raise DoctorError(
            f"{format_endpoint(address, port)} cannot be reached from {socket.gethostname()}: "
            f"{reason}"
        )


def _until(condition: Callable[[], bool], wait_s: float) -> bool:
    limit_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > limit_s:
            return False
        time.sleep(0.05)
    return True
