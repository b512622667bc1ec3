"""Ctrl-C and SIGTERM to a launcher that waits for other machines: there are no ranks to answer."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Self

from torch.distributed.elastic.multiprocessing.api import SignalException

from thinpipe.launch.host.scratch import remove_scratch_folder

_BEFORE = "asked to stop before the run began"
_AGAIN = "asked to stop before the restart: the run ends as it was saved last"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SOON_S, _END_S = 0.3, 2.0
"""When the main thread, which may be inside a C++ call, should have said so, and have ended."""


class Stop:
    """Raises torch's `SignalException` in the main thread, after a line that says so.

    A context manager around all that a launcher does. As soon as there are ranks, torch's agent
    handles signals, and the ranks answer. Python runs no handler while the main thread is inside a
    C++ call, such as connecting to a store: a thread then ends the process.
    """

    def __init__(self) -> None:
        self._words: str | None = _BEFORE
        self._said, self._over = threading.Lock(), False

    def __enter__(self) -> Self:
        self._numbers, self._written = os.pipe()
        os.set_blocking(self._written, False)
        signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._raise) for number in _SIGNALS}
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
        """All machines are there."""
        self._words = None

    def say(self) -> None:
        """Answer the user, once; nothing if there are ranks."""
        words = self._words
        if words is not None and self._said.acquire(blocking=False):
            os.write(2, f"{words}\n".encode())

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:  # what is cleared away now is not disturbed
            signal.signal(each, signal.SIG_IGN)
        self.say()
        raise SignalException("asked to stop", sigval=signal.Signals(number))

    def _watch(self) -> None:
        while numbers := os.read(self._numbers, 64):
            asked = [number for number in numbers if number in _SIGNALS]
            if asked and self._words is not None:
                time.sleep(_SOON_S)
                if not self._over:
                    self.say()
                    time.sleep(_END_S - _SOON_S)
                if not self._over:
                    remove_scratch_folder()
                    os._exit(128 + asked[0])
        os.close(self._numbers)
