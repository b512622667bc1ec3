"""Ranks are forked from one process that has imported all they need, once for all of them.

The launcher starts it as its first act, so that both import at the same time. It computes nothing
and starts no threads, which ranks could not inherit. It is the standard library's; when the
launcher dies it dies too, however that happens, and then its ranks.
"""

import contextlib
import ctypes
import functools
import os
import pkgutil
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from typing import Any

import psutil

from thinpipe.gradcomp import methods
from thinpipe.launch.host.signals import ENDING_SIGNALS
from thinpipe.launch.host.terminal import end_now, print_error

PARENT = "THINPIPE_PARENT"
"""Environment variable that tells a process which one it must not outlive."""

START_METHOD = "forkserver"
_FORKED = "thinpipe.launch.net.ranks.forked"

PRELOADED = (
    "thinpipe.launch.start",
    "thinpipe.launch.rank",
    "thinpipe.launch.run.script",
    "thinpipe.launch.data.load",
    *(f"{methods.__name__}.{method.name}" for method in pkgutil.iter_modules(methods.__path__)),
)
"""Modules that ranks need, whatever they train."""
KERNELS = "thinpipe.pipeline.wire.kernels.cpu.loaded"
_SOON = (KERNELS, "thinpipe.pipeline.schedule")
"""A newcomer loads kernels while it waits, and is told its memory. The schedule is loaded last: it
brings torch's compiler along, with which memory is counted, and takes a second.
"""
NEWCOMER = ("thinpipe.launch.run.elastic.training",)


def start(*, lean: bool = False) -> None:
    """Start the server, unless it runs already; call it before there are threads.

    `lean`: its ranks join a run, and run no schedule.
    """
    # What the launcher left behind when it was killed is cleared away without a word.
    sys.warnoptions.append("ignore:resource_tracker")
    _outlive_the_resource_tracker()
    # the first sees to the server's end
    forkserver.set_forkserver_preload([_FORKED, *PRELOADED, *(NEWCOMER if lean else _SOON)])
    settings = {PARENT: str(os.getpid()), "PYTHONSAFEPATH": "1"}  # as python -P
    settings["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # each rank sets its own
    # they end the launcher, which ends the ranks in order: what is between them blocks them
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        with _environment(settings):  # also for the tracker: files here are not its modules
            resource_tracker.ensure_running()  # which ends at SIGHUP otherwise
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)  # it has lifted a part
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@functools.cache
def _outlive_the_resource_tracker() -> None:
    """Do not complain if it is killed: another starts, which does not know what the first knew.

    It only clears away what a killed launcher leaves. So names are told again before they are taken
    back: to take back an unknown name prints a traceback.
    """
    warnings.filterwarnings("ignore", "resource_tracker: process died", UserWarning)
    forget = resource_tracker.unregister

    def unregister(name: Any, rtype: str) -> None:
        resource_tracker.register(name, rtype)
        forget(name, rtype)

    resource_tracker.unregister = unregister


GONE = (
    "the process that starts this machine's ranks is gone: it was killed, or this machine ran out "
    "of memory (dmesg shows it)"
)


def is_gone() -> bool:
    """Whether the server was killed, and with it the ranks."""
    try:
        return not _servers()
    except OSError:  # /proc is hidden, and nobody can tell
        return False


def signal_ranks(number: int) -> None:
    """Send a signal to the server and all that it has forked: they are one process group."""
    with contextlib.suppress(OSError):  # it has not made one yet, or has ended; or /proc is hidden
        for server in _servers():
            os.killpg(server.pid, number)


def revive() -> None:
    """Start the server again, and say so, if it was killed."""
    if is_gone():
        print_error(f"{GONE}; starting it again")
        start()


def _servers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if forkserver.__name__ in " ".join(child.cmdline()):  # empty if it has ended
                found.append(child)
    return found


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def end_with_parent() -> None:
    """Ask Linux to end this process when the one that started it dies, however it dies."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        end_now(1)


def name_process(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show; at most 15 letters."""
    pr_set_name = 15
    ctypes.CDLL(None).prctl(pr_set_name, name.encode())
