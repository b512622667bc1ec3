"""Waits that nothing wakes up: a thread waits, and is abandoned.

gloo (pair.cc, `signalException`) forgets messages that a broken connection had sent or received in
part: who waits for one waits until its timeout. So does who waits for a lost peer to connect.
"""

import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from thinpipe.pipeline.wire.thread import Worker

_POLL_S = 0.02  # so late a loss is noticed; `_WOKEN_S` of elastic/generations.py is three of these

_T = TypeVar("_T")
_is_over: Callable[[], bool] | None = None
_own = threading.local()


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
    # kept for the next call: to start a thread takes longer than most messages wait
    helper: Worker = _own.__dict__.pop("helper", None) or Worker("wait")
    answer = helper.submit(call)
    while not wait([answer], _POLL_S).done:
        if over():
            del helper  # which an error's frames would hold
            raise RuntimeError("another rank was lost meanwhile")
    if answer.exception() is None:  # after a failure it runs nothing more
        _own.helper = helper
    del helper
    return answer.result()  # type: ignore[no-any-return]
