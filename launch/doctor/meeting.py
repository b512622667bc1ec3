"""The hosts of an examination meet at one of them, and share JSON through its store."""

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

from thinpipe.launch.host.interfaces import is_here


class DoctorError(RuntimeError):
    """The examination cannot go on; the message has the remedy."""


@dataclass(frozen=True)
class Meeting:
    """All hosts are here; `place` is this one's, in the order of addresses as a run has it."""

    store: TCPStore
    place: int
    hosts: int
    serves: bool
    wait_s: float

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every host's value, in order."""
        self.tell(f"{what}/{self.place}", value)
        return [self.hear(f"{what}/{place}") for place in range(self.hosts)]

    def end(self) -> None:
        """Go; whoever holds the store waits until nobody reads it any more."""
        self.gather("done", True)
        self.tell(f"gone/{self.place}", True)
        for place in range(self.hosts if self.serves else 0):
            self.hear(f"gone/{place}")

    def tell(self, key: str, value: Any) -> None:
        """Publish a value once.

        Raises:
            DoctorError: the host that holds the store is gone.
        """
        with _lost_while(f"telling {key!r}"):
            self.store.set(key, json.dumps(value))

    def hear(self, key: str, wait_s: float | None = None) -> Any:
        """Wait for a value.

        Raises:
            DoctorError: nothing came.
        """
        with _lost_while(f"waiting for {key!r}"):
            self.store.wait([key], timedelta(seconds=wait_s or self.wait_s))
            return json.loads(self.store.get(key))


def meet(endpoint: tuple[str, int], own: str, hosts: int, *, wait_s: float) -> Meeting:
    """Wait until all hosts have come to `endpoint` (address, port); `own` is this one's address.

    Raises:
        DoctorError: the endpoint cannot be opened or reached, or some host did not come.
    """
    address, port = endpoint
    store, serves = _open(address, port, wait_s)
    with _lost_while(f"hosts were coming to {address}:{port}"):
        number = store.add("come", 1) - 1
        mine = [own, os.getpid(), socket.gethostname()]
        store.set(f"who/{number}", json.dumps(mine))
        _until(lambda: store.add("come", 0) >= hosts, wait_s)
        come = store.add("come", 0)
        if come != hosts:
            raise DoctorError(
                f"{come} of {hosts} hosts came to {address}:{port} within {wait_s:.0f} s; start "
                f"doctor with the same --nnodes on every host at about the same time"
            )
        everyone = sorted(json.loads(store.get(f"who/{n}")) for n in range(hosts))
    return Meeting(store, everyone.index(mine), hosts, serves, wait_s)


@contextlib.contextmanager
def _lost_while(doing: str) -> Iterator[None]:
    """Make the store's failures `DoctorError`s."""
    try:
        yield
    except DoctorError:
        raise
    except RuntimeError as error:
        raise DoctorError(
            f"lost another host while {doing} ({str(error).splitlines()[0]}); see what it says, "
            "and start doctor again on all"
        ) from None


def _open(address: str, port: int, wait_s: float) -> tuple[TCPStore, bool]:
    """The store, and whether this process holds it: the first one at the address that comes."""
    timeout = timedelta(seconds=wait_s)
    if is_here(address):
        with contextlib.suppress(RuntimeError):  # another one on this machine was first
            return TCPStore(address, port, None, True, timeout, wait_for_workers=False), True
    _reach(address, port, wait_s)
    try:
        return TCPStore(address, port, None, False, timeout, wait_for_workers=False), False
    except RuntimeError as error:
        raise DoctorError(f"{address}:{port}: {str(error).splitlines()[0]}") from None


def _reach(address: str, port: int, wait_s: float) -> None:
    """Wait until the port can be connected to; say what stands in the way if it cannot."""
    reason = ""

    def connected() -> bool:
        nonlocal reason
        try:
            socket.create_connection((address, port), timeout=2).close()
        except TimeoutError:
            reason = (
                "no answer, as when a firewall drops it; open the port there "
                f"(ufw allow {port}/tcp, or firewall-cmd --add-port {port}/tcp)"
            )
        except OSError as error:
            reason = (
                f"{error.strerror}; is doctor started there, with the same --rdzv, and is the port "
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
