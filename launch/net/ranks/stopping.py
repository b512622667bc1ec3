"""Signals to a launcher: it ends its ranks in order, or pauses them."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from torch.distributed.elastic.multiprocessing.api import SignalException

from thinpipe.launch.host.signals import handled
from thinpipe.launch.host.terminal import end_now, print_error
from thinpipe.launch.net.ranks.fork_server import signal_ranks

_BEFORE = "asked to stop before the run began"
_AGAIN = "asked to stop before the restart: the run ends at its last checkpoint"
_AT_ONCE = "ended at once: the run is at its last checkpoint"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SOON_S, _END_S = 0.3, 2.0
"""When the main thread, which may be inside a C++ call, should have said so, and have ended."""
_SAME_S = 1.0
"""A terminal, a shell and a supervisor may each pass the same Ctrl-C on; a second one is later."""


def wakeup_pipe() -> tuple[int, int]:
    """Both ends of a pipe, to which the interpreter writes the number of each signal at once.

    It runs no handler while the main thread is inside a C++ call, such as waiting for a peer or
    connecting to a store: a thread that reads here learns of signals nevertheless.
    """
    numbers, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    return numbers, written


class Stop:
    """Raises torch's `SignalException` in the main thread, once, however often it is asked to stop.

    A context manager around all that a launcher does. What was ignored before stays ignored.
    Where there are ranks, torch's agent passes the signal on, and they answer; without, a line says
    so. SIGQUIT, and Ctrl-C a second time, end the run at once: its ranks end with this process.
    """

    def __init__(self) -> None:
        self._words: str | None = _BEFORE
        self._said, self._over = threading.Lock(), False
        self._asked_s: float | None = None

    def __enter__(self) -> Self:
        self._numbers, self._written = wakeup_pipe()
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            **dict.fromkeys(_SIGNALS, self._raise),
            signal.SIGQUIT: self._end_at_once,
            signal.SIGTSTP: self._pause,
        }
        self._handlers = {
            number: signal.signal(number, handlers[number]) for number in handled(handlers)
        }
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._written)

    def waits(self) -> None:
        """The ranks have ended, and are to be started again."""
        self._words = _AGAIN

    def runs(self) -> None:
        self._words = None

    def say(self) -> None:
        """Answer the user, once; nothing if there are ranks."""
        words = self._words
        if words is not None and self._said.acquire(blocking=False):
            print_error(words)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now_s
            self.say()
            raise SignalException("asked to stop", sigval=signal.Signals(number))
        if number == signal.SIGINT and self._words is None and now_s - self._asked_s > _SAME_S:
            self._end_at_once(number, frame)

    @staticmethod
    def _end_at_once(number: int, _frame: FrameType | None) -> None:
        end_now(128 + number, _AT_ONCE)

    @staticmethod
    def _pause(_number: int, _frame: FrameType | None) -> None:
        """Stop, and go on at SIGCONT, with the ranks: they are in a session of their own."""
        signal_ranks(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        signal_ranks(signal.SIGCONT)

    def _watch(self) -> None:
        while numbers := os.read(self._numbers, 64):
            asked = [number for number in numbers if number in _SIGNALS]
            if asked and self._words is not None:
                time.sleep(_SOON_S)
                if not self._over:
                    self.say()
                    time.sleep(_END_S - _SOON_S)
                if not self._over:
                    end_now(128 + asked[0])
        os.close(self._numbers)
