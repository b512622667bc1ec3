"""The hosts that doctor checks: they connect to a store on one of them and exchange JSON."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not re-exported

from thinpipe.launch.host.interfaces import is_own_address


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

    def gather(self, key: str, value: Any) -> list[Any]:
        """Every host's value, in order."""
        self.publish(f"{key}/{self.index}", value)
        return [self.wait_for(f"{key}/{index}") for index in range(self.hosts)]

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


def join_group(endpoint: tuple[str, int], own: str, hosts: int, *, wait_s: float) -> HostGroup:
    """Wait until all hosts have joined at `endpoint` (address, port); `own` is our address.

    Raises:
        DoctorError: the endpoint cannot be opened or reached, or a host did not join in time.
    """
    address, port = endpoint
    store, is_server = _open(address, port, wait_s)
    with _name_lost_host(f"waiting for hosts to join at {address}:{port}"):
        number = store.add("joined", 1) - 1
        mine = [own, os.getpid(), socket.gethostname()]
        store.set(f"host/{number}", json.dumps(mine))
        _until(lambda: store.add("joined", 0) >= hosts, wait_s)
        joined = store.add("joined", 0)
        if joined != hosts:
            raise DoctorError(
                f"{joined} of {hosts} hosts joined at {address}:{port} within {wait_s:.0f} s; "
                f"start doctor with the same --nnodes on every host at about the same time"
            )
        everyone = sorted(json.loads(store.get(f"host/{n}")) for n in range(hosts))
    return HostGroup(store, everyone.index(mine), hosts, is_server, wait_s)


@contextlib.contextmanager
def _name_lost_host(doing: str) -> Iterator[None]:
    """Turn failures of the store into `DoctorError`s."""
    try:
        yield
    except DoctorError:
        raise
    except RuntimeError as error:
        raise DoctorError(
            f"lost another host while {doing} ({str(error).splitlines()[0]}); see its output, "
            "and start doctor again on all hosts"
        ) from None


def _open(address: str, port: int, wait_s: float) -> tuple[TCPStore, bool]:
    """The store, and whether this process serves it: the first one at the address does."""
    timeout = timedelta(seconds=wait_s)
    if is_own_address(address):
        with contextlib.suppress(RuntimeError):  # another process on this machine was first
            return TCPStore(address, port, None, True, timeout, wait_for_workers=False), True
    _reach(address, port, wait_s)
    try:
        return TCPStore(address, port, None, False, timeout, wait_for_workers=False), False
    except RuntimeError as error:
        raise DoctorError(f"{address}:{port}: {str(error).splitlines()[0]}") from None


def _reach(address: str, port: int, wait_s: float) -> None:
    """Wait until the port accepts connections.

    Raises:
        DoctorError: it does not; names the reason and the remedy.
    """
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
            f"{address}:{port} cannot be reached from {socket.gethostname()}: {reason}"
        )


def _until(condition: Callable[[], bool], wait_s: float) -> bool:
    limit_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > limit_s:
            return False
        time.sleep(0.05)
    return True
