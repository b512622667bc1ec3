"""A process that waits for a rank, and says what ended it if the rank no longer can."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore

from thinpipe.launch.host.signals import ENDING_SIGNALS, handled, pass_on_signals
from thinpipe.launch.host.terminal import print_error
from thinpipe.launch.net.ranks.failures import LOST, Failures, Losses, death_by
from thinpipe.launch.net.ranks.store import connect_store

DESCRIPTOR = "THINPIPE_SUPERVISOR"
"""Environment variable: where a rank says how its supervisor finds the run's failures."""
_REPORT_S = 5.0
_VMSTAT = Path("/proc/vmstat")


def announce(address: tuple[str, int], name: str, who: str, rank: int) -> None:
    """Called by a rank: its run's failures are in this store, under this name, and who it is.

    What it says last counts.
    """
    descriptor = os.environ.get(DESCRIPTOR)
    if descriptor is not None:
        os.write(int(descriptor), json.dumps([*address, name, who, rank]).encode() + b"\n")


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
    asked = pass_on_signals(rank)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    for number in handled(ENDING_SIGNALS):  # nobody is left to pass them on to
        signal.signal(number, signal.SIG_DFL)
    if code == LOST:
        return True
    if code >= 0:
        sys.exit(code)
    if not asked:
        code = _report(death_by(-code, out_of_memory=_memory_kills() > kills), reading)
        if code == LOST:
            return True
        sys.exit(code)
    if -code != signal.SIGKILL:  # which cannot be handled
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return False


def _report(message: str, reading: int) -> int:
    """Tell the others; what this process exits with."""
    os.set_blocking(reading, False)  # a child of the rank's may hold the other end
    try:
        host, port, name, who, rank = json.loads(os.read(reading, 4096).splitlines()[-1])
    except (BlockingIOError, ValueError, IndexError):  # it died before there were others
        print_error(f"rank {os.environ['RANK']}: {message}")
        return 1
    print_error(f"{who}: {message}")
    try:
        store = PrefixStore(name, connect_store((host, port), wait_s=_REPORT_S))
        losses, failures = Losses(store), Failures(store, who)
        if losses.is_open:
            losses.report(rank, f"{who}: {message}")
            if code := losses.settled(rank, lambda: failures.known() is not None):
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
