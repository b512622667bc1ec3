"""The hosts of an examination meet at one of them, and share JSON through its store."""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not re-exported

from launch.interfaces import is_here


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
        """Publish a value once."""
        self.store.set(key, json.dumps(value))

    def hear(self, key: str, wait_s: float | None = None) -> Any:
        """Wait for a value.

        Raises:
            DoctorError: nothing came.
        """
        try:
            self.store.wait([key], timedelta(seconds=wait_s or self.wait_s))
            return json.loads(self.store.get(key))
        except RuntimeError as error:
            raise DoctorError(
                f"lost another host while waiting for {key!r} ({str(error).splitlines()[0]}); see "
                "what it says, and start doctor again on all"
            ) from None


def meet(endpoint: tuple[str, int], own: str, hosts: int, *, wait_s: float) -> Meeting:
    """Wait until all hosts have come to `endpoint` (address, port); `own` is this one's address.

    Raises:
        DoctorError: the endpoint cannot be opened or reached, or some host did not come.
    """
    address, port = endpoint
    timeout = timedelta(seconds=wait_s)
    serves = is_here(address) and _is_free(address, port)
    if not serves:
        _reach(address, port, wait_s)
    try:
        store = TCPStore(address, port, None, serves, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise DoctorError(f"{address}:{port}: {str(error).splitlines()[0]}") from None
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


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((address, port))
        except OSError:
            return False
    return True


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
