"""Waits that another thread makes: their results, and what is left of those that are abandoned."""

import threading
import weakref
from typing import Any

import pytest
import torch

from tests.waiting import until
from thinpipe.pipeline.comm.abandoned import abandonable


def _never() -> bool:
    return False


def _thread() -> int:
    return threading.get_ident()


def _fails() -> None:
    raise ValueError("no such peer")


def test_results_and_errors_are_those_of_the_call_and_one_thread_makes_many() -> None:
    assert abandonable(_thread, _never) == abandonable(_thread, _never) != _thread()
    with pytest.raises(ValueError, match="no such peer"):
        abandonable(_fails, _never)
    assert abandonable(_thread, _never) != _thread()


def test_calls_after_an_abandoned_one_do_not_wait_for_it_and_its_thread_ends() -> None:
    goes_on, threads = threading.Event(), list[threading.Thread]()

    def hang() -> bool:
        threads.append(threading.current_thread())
        return goes_on.wait()

    with pytest.raises(RuntimeError, match="another rank was lost"):
        abandonable(hang, lambda: bool(threads))
    assert abandonable(_thread, _never) != threads[0].ident
    assert threads[0].is_alive()
    goes_on.set()
    until(lambda: not threads[0].is_alive())


def test_what_a_call_held_is_let_go() -> None:
    message = torch.zeros(3)
    alive: Any = weakref.ref(message)
    abandonable(message.sum, _never)
    del message
    until(lambda: alive() is None)


def test_a_thread_that_ends_leaves_no_other() -> None:
    threads = list[threading.Thread]()

    def wait() -> None:
        abandonable(lambda: threads.append(threading.current_thread()), _never)

    own = threading.Thread(target=wait)
    own.start()
    own.join()
    until(lambda: not threads[0].is_alive())
