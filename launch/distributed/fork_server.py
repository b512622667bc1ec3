"""Ranks are forked from one process that has imported all they need, once for all of them.

The launcher starts it as its first act, so that both import at the same time. It computes nothing
and starts no threads, which ranks could not inherit. It is the standard library's; when the
launcher dies it dies too, however that happens, and then its ranks.
"""

import contextlib
import ctypes
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver, resource_tracker

import psutil

from thinpipe.gradcomp import methods

PARENT = "THINPIPE_PARENT"
"""Environment variable that tells a process which one it must not outlive."""

START_METHOD = "forkserver" if sys.platform.startswith("linux") else "spawn"

HELD_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
"""They end the launcher, which ends the ranks in order; so the server between them blocks these."""

_FORKED = "thinpipe.launch.distributed.forked"

PRELOADED = (
    "thinpipe.launch.start",
    "thinpipe.pipeline.wire.kernels.cpu.uniform",
    "thinpipe.pipeline.wire.kernels.cpu.rows",
    *(f"{methods.__name__}.{method.name}" for method in pkgutil.iter_modules(methods.__path__)),
)
"""What ranks need, whatever they train."""


def start() -> None:
    """Start the server, unless it runs already; call it before there are threads."""
    if START_METHOD != "forkserver":
        return
    # What the launcher left behind when it was killed is cleared away without a word.
    sys.warnoptions.append("ignore:resource_tracker")
    resource_tracker.ensure_running()
    forkserver.set_forkserver_preload([_FORKED, *PRELOADED])  # it sees to the server's end
    settings = {PARENT: str(os.getpid()), "PYTHONSAFEPATH": "1"}  # as python -P
    settings["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")  # each rank sets its own
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        with _environment(settings):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


GONE = (
    "the process that starts this machine's ranks is gone: it was killed, or this machine ran out "
    "of memory (dmesg shows it)"
)


def is_gone() -> bool:
    """Whether the server was killed, and with it the ranks."""
    return START_METHOD == "forkserver" and not any(map(_is_server, psutil.Process().children()))


def revive() -> None:
    """Start the server again, and say so, if it was killed."""
    if is_gone():
        os.write(2, f"{GONE}; starting it again\n".encode())
        start()


def _is_server(child: psutil.Process) -> bool:
    try:
        return forkserver.__name__ in " ".join(child.cmdline())  # empty if it has ended
    except psutil.Error:
        return False


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
    if parent is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        os._exit(1)


def name_process(name: str) -> None:
    """What `top` and `ps -o comm` show of this process; at most 15 letters."""
    if sys.platform.startswith("linux"):
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode())
