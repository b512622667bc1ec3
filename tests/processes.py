"""Processes that may end while a test looks at them: one that has ended is passed over."""

import contextlib
from collections.abc import Iterable, Iterator

import psutil


def running() -> Iterator[psutil.Process]:
    """All processes; `psutil.process_iter` remembers those of namespaces that are gone."""
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def started_with(word: str) -> list[psutil.Process]:
    """Those with this argument."""
    found = []
    for process in running():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if word in process.cmdline():
                found.append(process)
    return found


def signal_all(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to each; the first that gets it may end the others at once."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def named(processes: Iterable[psutil.Process], name: str) -> list[psutil.Process]:
    """Those whose name begins so."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith(name):
                found.append(process)
    return found


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended, reaped or not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
