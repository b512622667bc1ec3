"""The hosts that doctor checks: they connect to a store on one of them and exchange JSON."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not re-exported

from thinpipe.launch.host.interfaces import format_endpoint
from thinpipe.launch.host.packages import first_line
from thinpipe.launch.net.ranks.network import HostNetwork

_POLL_S = 0.05


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
        """Raises DoctorError: the host of the store is gone."""
        with _name_lost_host(f"publishing {key!r}"):
            self.store.set(key, json.dumps(value))

    def wait_for(self, key: str, wait_s: float | None = None) -> Any:
        """Raises DoctorError: the value was not published in time."""
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
    if network.server is None and network.overlay is None:
        _reach(*network.store, wait_s)
    try:
        store = network.open_store(wait_s)
    except RuntimeError as error:
        raise DoctorError(f"{format_endpoint(*network.store)}: {first_line(error)}") from None
    with _name_lost_host(f"waiting for hosts to join at {where}"):
        number = store.add("joined", 1) - 1
        mine = [network.order, network.name, socket.gethostname()]
        store.set(f"host/{number}", json.dumps(mine))
        limit_s = time.monotonic() + wait_s
        while (joined := store.add("joined", 0)) < hosts and time.monotonic() < limit_s:
            time.sleep(_POLL_S)
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


def _reach(address: str, port: int, wait_s: float) -> None:
    limit_s = time.monotonic() + wait_s
    while True:
        try:
            socket.create_connection((address, port), timeout=2).close()
            return
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
        if time.monotonic() > limit_s:
            where = f"{format_endpoint(address, port)} cannot be reached"
            raise DoctorError(f"{where} from {socket.gethostname()}: {reason}")
        time.sleep(_POLL_S)
