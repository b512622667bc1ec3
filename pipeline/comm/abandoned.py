"""Waits that nothing wakes up: a thread waits, and is abandoned.

gloo (pair.cc, `signalException`) forgets messages that a broken connection had sent or received in
part: who waits for one waits until its timeout. So does who waits for a lost peer to connect.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

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
    helper: _Helper = _own.__dict__.pop("helper", None) or _Helper()
    answer = helper.ask(call)
    while True:
        try:
            result, error = answer.get(timeout=_POLL_S)
            break
        except Empty:
            if over():
                del helper  # which an error's frames would hold
                raise RuntimeError("another rank was lost meanwhile") from None
    _own.helper = helper
    del helper
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


class _Helper:
    """A thread that makes calls, one after the other; it ends once nobody holds this object."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[Any]()
        threading.Thread(target=_serve, args=(self._calls,), daemon=True).start()

    def ask(self, call: Callable[[], Any]) -> "SimpleQueue[tuple[Any, BaseException | None]]":
        """Where the result will be, or what was raised."""
        answer = SimpleQueue[tuple[Any, BaseException | None]]()
        self._calls.put((call, answer))
        return answer

    def __del__(self) -> None:
        self._calls.put(None)


def _serve(calls: "SimpleQueue[Any]") -> None:
    while (asked := calls.get()) is not None:
        _answer(*asked)
        del asked  # which holds a message


def _answer(call: Callable[[], Any], answer: "SimpleQueue[Any]") -> None:
    try:
        answer.put((call(), None))
    except BaseException as error:
        answer.put((None, error))
