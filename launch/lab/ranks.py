"""Processes inside the hosts: forked, monitored, and stopped together."""

import math
import os
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from thinpipe.launch.host.signals import handled, held
from thinpipe.launch.host.terminal import print_error
from thinpipe.launch.lab import linux

GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
STOPPING = (*ENDING, signal.SIGINT)
LEFT_OUT = os.EX_TEMPFAIL
"""Of a machine that the others go on without (`LOST` in `net/ranks/failures.py`)."""
_CHUNK = 65536  # as much as a pipe holds
_DRAIN_S = 2.0  # for the last output: what a command has left running may print on

Namespaces = Sequence[tuple[int, int]]
"""(descriptor, flag) of the namespaces to enter, in this order."""


def start(namespaces: Namespaces, body: Callable[[], int]) -> int:
    """Fork a process into `namespaces` that calls `body` and exits with its result.

    Returns the process to wait for, a proxy of the one inside (only a new child can be in another
    pid namespace): it forwards SIGTERM and exits with the same code, 128 + n for signal n.
    """
    sys.stdout.flush()  # else what is buffered is printed by the child, too
    sys.stderr.flush()
    with warnings.catch_warnings(), held(STOPPING):
        # other threads hold no lock that the child could need
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            _run_proxy(namespaces, body)
    return pid


def _run_proxy(namespaces: Namespaces, body: Callable[[], int]) -> NoReturn:
    """Fork the process inside and wait for it; the sandbox kills it when our parent has exited.

    `STOPPING` is blocked until each of both has its own way to take it.
    """

    def forward(signum: int, _: FrameType | None) -> None:
        os.kill(inside, signum)

    try:
        folder = os.getcwd()
        myself = os.pidfd_open(os.getpid())
        for descriptor, flag in namespaces:
            linux.setns(descriptor, flag)
        os.chdir(folder)  # a mount namespace is entered at its root
        ending = handled(ENDING)
        inside = os.fork()
        if inside == 0:
            linux.die_with_parent(myself)
            for signum in ending:
                signal.signal(signum, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
            os._exit(body())  # not the exit handlers of the process that forked it
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to that process too
        for signum in ending:
            signal.signal(signum, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        os.waitid(os.P_PID, inside, os.WEXITED | os.WNOWAIT)  # until it is reaped, `forward` may
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        code = os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    except KeyboardInterrupt:  # it came before `body` had its own way to take it
        os._exit(128 + signal.SIGINT)
    except BaseException as error:
        print_error(f"cannot enter the emulated host: {error!r}")
    os._exit(1)


class ProcessMonitor:
    """Waits for processes and reads their output; when one fails, stops the others."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        """Exit codes by host, of finished processes."""
        self._alive: dict[int, tuple[int, int]] = {}
        self._selector = selectors.DefaultSelector()
        self._due = {signal.SIGTERM: math.inf, signal.SIGKILL: math.inf}
        self._failed: int | None = None

    def process(self, host: int, pid: int) -> None:
        self._alive[host] = pid, os.pidfd_open(pid)
        # a pidfd is readable once its process has ended
        self._selector.register(self._alive[host][1], selectors.EVENT_READ, (self._reap, host))

    def stream(self, descriptor: int, take: Callable[[bytes], None]) -> None:
        """Pass data from a pipe to `take`, and `b""` at its end; then close the pipe."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, (self._read, (descriptor, take)))

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until all have exited; return the host that failed first, or None.

        Raises:
            TimeoutError: after `timeout_s`; the processes continue.
        """
        limit = time.monotonic() + timeout_s if timeout_s is not None else math.inf
        while self._alive:
            now = time.monotonic()
            if now >= limit:
                raise TimeoutError(f"hosts {sorted(self._alive)} still run after {timeout_s} s")
            self._enforce(now)
            until = min(limit, *self._due.values())
            self._step(None if until == math.inf else max(0.0, until - now))
        limit = time.monotonic() + _DRAIN_S
        while self._selector.get_map() and self._step(0) and time.monotonic() < limit:
            pass  # the last output; processes left running may keep a pipe open, or busy
        for key in list(self._selector.get_map().values()):
            self._forget(key.fd)
        return self._failed

    def end(self, after_s: float = 0.0) -> None:
        """Send SIGTERM to all after a while, and SIGKILL after a grace period."""
        begin = time.monotonic() + after_s
        self._due = {signal.SIGTERM: begin, signal.SIGKILL: begin + GRACE_S}

    def _enforce(self, now: float) -> None:
        for signum, limit in self._due.items():
            if now >= limit:
                self._due[signum] = math.inf
                for pid, _ in self._alive.values():
                    os.kill(pid, signum)

    def _step(self, timeout: float | None) -> int:
        events = self._selector.select(timeout)
        for key, _ in events:
            handle, argument = key.data
            handle(argument)
        return len(events)

    def _reap(self, host: int) -> None:
        pid, pidfd = self._alive.pop(host)
        self._forget(pidfd)
        self.codes[host] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if self.codes[host] not in (0, LEFT_OUT) and self._failed is None:
            self._failed = host
            self.end()

    def _read(self, stream: tuple[int, Callable[[bytes], None]]) -> None:
        descriptor, take = stream
        data = os.read(descriptor, _CHUNK)
        if not data:
            self._forget(descriptor)
        take(data)

    def _forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
