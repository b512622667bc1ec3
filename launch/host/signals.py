"""Signals that end a run: what is ignored stays ignored; the first process of a container.

Around a fork they are blocked: in the child our handlers would act as if it were its parent, or
raise in an interpreter that is not ready, which prints that and forgets the signal.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from types import FrameType

ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}

STOP_ALL = signal.SIGUSR1
"""Sent to one rank, it stops the whole run, even if the others could go on without its machine."""


def leave_first_process() -> None:
    """If this is process 1, go on as a child of it, which gets its signals, and gives its code."""
    if os.getpid() != 1:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
        return
    pass_on_signals(child)
    while (ended := os.wait())[0] != child:
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


def pass_on_signals(child: int) -> Collection[int]:
    """Have a process get what comes here, if that is not ignored; the signals that came since."""
    came: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(child, number)

    for number in handled(ENDING_SIGNALS):
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    return came


@contextlib.contextmanager
def held(numbers: Iterable[int]) -> Iterator[None]:
    """Signals that come meanwhile are handled afterwards; what is forked here has them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def handled(numbers: Iterable[int]) -> list[int]:
    """Of these signals, those that are not ignored: what `nohup` ignores stays ignored."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
