"""A process that waits for a rank, and says what ended it if the rank no longer can."""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from thinpipe.launch.host.signals import ENDING_SIGNALS, handled, pass_on_signals
from thinpipe.launch.host.terminal import end_now, print_error
from thinpipe.launch.net.ranks.failures import LOST, Failures, Losses, death_by
from thinpipe.launch.net.ranks.store import connect_store

DESCRIPTOR = "THINPIPE_SUPERVISOR"
"""Environment variable: where a rank says how its supervisor finds the run's failures."""
_REPORT_S = 5.0  # to connect; other ranks wait as long for a cause (`_CAUSE_S` in failures.py)
_LOOK_S = 2.0  # short against `_HANGS_S`; each look is a request to the store
_HANGS_S = 10.0
"""From when the others go on without a rank until it is killed, if it has not ended."""
_HUNG = f"had not ended {_HANGS_S:.0f} s after the others went on without it, and was killed"
_VMSTAT = Path("/proc/vmstat")


def announce(address: tuple[str, int], name: str, host: str, rank: int) -> None:
    """Called by a rank on `host`: its run's failures are in this store, under this name.

    What it says last counts.
    """
    descriptor = os.environ.get(DESCRIPTOR)
    if descriptor is not None:
        said = [*address, name, f"rank {rank} on {host}", rank]
        os.write(int(descriptor), json.dumps(said).encode() + b"\n")


def supervise(be_rank: Callable[[], None]) -> bool:
    """Fork a rank, pass signals on to it, and exit as it does.

    A rank that another signal ended is reported to all others, with the likely reason. This process
    then exits with 1: one that ended by a signal too would pass for killed itself. If the others go
    on without the rank it returns True, as torch's agent would end those of this machine; it never
    returns False.
    """
    reading, writing = os.pipe()
    kills = _memory_kills()
    rank = os.fork()
    if rank == 0:
        os.close(reading)
        os.environ[DESCRIPTOR] = str(writing)
        be_rank()
        os._exit(0)
    os.close(writing)
    said, ended = _Said(reading), threading.Event()
    threading.Thread(target=_end_if_lost, args=(rank, said, ended), daemon=True).start()
    asked = pass_on_signals(rank)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    ended.set()
    for number in handled(ENDING_SIGNALS):  # nobody is left to pass them on to
        signal.signal(number, signal.SIG_DFL)
    if code == LOST:
        return True
    if code == 0 and asked:  # the agent asked for that, and waits for this process to end
        end_now(0)
    if code >= 0:
        sys.exit(code)
    if not asked:
        died = death_by(-code, out_of_memory=_memory_kills() > kills)
        if (code := _report(_HUNG if said.hangs else died, said)) == LOST:
            return True
        sys.exit(code)
    if -code != signal.SIGKILL:  # which cannot be handled
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return False


class _Said:
    """What a rank has announced last: the store of its run, and who it is."""

    def __init__(self, reading: int) -> None:
        self._reading, self._lock = reading, threading.Lock()
        self._last: list[Any] | None = None
        self.hangs = False
        os.set_blocking(reading, False)  # a child of the rank's may hold the other end

    def last(self) -> list[Any] | None:
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                if lines := os.read(self._reading, 4096).splitlines():
                    self._last = json.loads(lines[-1])
            return self._last


def _end_if_lost(process: int, said: _Said, ended: threading.Event) -> None:
    """Kill a rank that the others go on without and that hangs; a thread."""
    store = None
    while not ended.wait(_LOOK_S):
        if (announced := said.last()) is None:
            continue
        host, port, name, _, rank = announced
        try:
            store = store or connect_store((host, port), wait_s=_REPORT_S)
            losses = Losses(PrefixStore(name, store))
            if not losses.has(rank):
                continue
            losses.settled(rank, ended.is_set)
        except RuntimeError:  # the store is late, or gone, which ends the rank
            store = None
            continue
        if not ended.wait(_HANGS_S):
            said.hangs = True
            os.kill(process, signal.SIGKILL)
        return


def _report(message: str, said: _Said) -> int:
    """Tell the others; what this process exits with."""
    announced = said.last()
    if announced is None:  # it died before there were others
        print_error(f"rank {os.environ['RANK']}: {message}")
        return 1
    host, port, name, who, rank = announced
    print_error(f"{who}: {message}")
    try:
        store = PrefixStore(name, connect_store((host, port), wait_s=_REPORT_S))
        losses, failures = Losses(store), Failures(store, who)
        if losses.is_open:
            losses.report(rank, f"{who}: {message}")
        # also if the others have ended meanwhile, without it
        if losses.has(rank) and (code := losses.settled(rank, lambda: bool(failures.known()))):
            return code
        failures.report(message, cause=True)
    except RuntimeError:
        print_error(f"{who}: the run's store is gone, so the others are not told")
    return 1


def _memory_kills() -> int:
    """How many processes this machine has killed for want of memory."""
    try:
        lines = _VMSTAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
