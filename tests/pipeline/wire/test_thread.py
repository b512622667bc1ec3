"""A thread next to training: in order, without gradients, no longer than its owner."""

import threading
import time

import pytest
import torch

from tests.waiting import until
from thinpipe.pipeline.wire.thread import Worker


def test_jobs_run_in_order_on_one_thread_without_gradients() -> None:
    worker, seen, all_wait = Worker("test"), [], threading.Event()

    def job(number: int) -> tuple[int, bool]:
        assert all_wait.wait(60)
        seen.append(number)
        return threading.get_ident(), torch.is_grad_enabled()

    futures = [worker.submit(lambda n=n: job(n)) for n in range(5)]  # type: ignore[misc]
    all_wait.set()
    found = [future.result() for future in futures]
    assert seen == list(range(5))
    assert len(set(found)) == 1
    assert found[0] != (threading.get_ident(), True)
    assert found[0][1] is False


def test_after_a_failure_nothing_runs_any_more() -> None:
    worker, ran = Worker("test"), []
    first = worker.submit(lambda: 1 / 0)
    second = worker.submit(lambda: ran.append(1))
    for future in (first, second):
        with pytest.raises(ZeroDivisionError):
            future.result()
    assert ran == []


def test_the_thread_ends_with_its_owner() -> None:
    worker = Worker("test")
    worker.submit(lambda: None).result()
    thread = worker._thread
    assert thread is not None
    del worker
    thread.join(60)
    assert not thread.is_alive()


def test_stopping_waits_for_the_jobs_but_not_for_ever() -> None:
    worker, done = Worker("test"), threading.Event()
    ended = worker.submit(lambda: until(worker._jobs.qsize))  # until it is being stopped
    worker.stop(60)
    assert ended.done()
    slow = Worker("slow")
    slow.submit(lambda: done.wait(60))
    start = time.monotonic()
    slow.stop(0.2)
    assert time.monotonic() - start < 30
    done.set()


def test_a_job_may_stop_its_own_thread() -> None:
    """Garbage is collected on any thread, and with it a worker's owner."""
    worker = Worker("test")
    worker.submit(lambda: worker.stop(60)).result(30)
