"""Waits that nothing wakes up: a thread waits, and is abandoned.

gloo (pair.cc, `signalException`) forgets messages that a broken connection had sent or received in
part: who waits for one waits until its timeout. So does who waits for a lost peer to connect.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

_POLL_S = 0.02

_T = TypeVar("_T")
_is_over: Callable[[], bool] | None = None


def abandon_if(is_over: Callable[[], bool]) -> None:
    """From now on calls of `abandonable` are abandoned, on all threads, once that is so."""
    global _is_over
    _is_over = is_over


def abandonable(call: Callable[[], _T], is_over: Callable[[], bool] | None = None) -> _T:
    """The result of a call, made by another thread so that this one can abandon it.

    `is_over` says when, by default that of `abandon_if`; without either it is a plain call.

    Raises:
        RuntimeError: it was abandoned, or the call failed.
    """
    over = is_over or _is_over
    if over is None:
        return call()
    found: Future[_T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not futures.wait([found], timeout=_POLL_S).done:
        if over():
            raise RuntimeError("another rank was lost meanwhile")
    return found.result()
