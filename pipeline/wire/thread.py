"""A thread for communication and codecs: one job after the other, in parallel with training."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

_Job = tuple[Callable[[], Any], "Future[Any]"]


class Worker:
    """Runs jobs in the order in which they were given, on a daemon thread of its own.

    Not a thread pool: the interpreter joins a pool's threads at exit, and one that waits for a dead
    peer would block it. After a job has failed, later ones fail with the same exception.
    """

    def __init__(self, name: str) -> None:
        """The thread, of that name, starts with the first job and ends with this object."""
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], Any]) -> "Future[Any]":
        """Run `job` later, without gradients; its result or exception is in the future."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._jobs,), name=self._name, daemon=True
            )
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def stop(self, timeout_s: float) -> None:
        """Wait for what there is to do, for so long at most; nothing may be submitted after it."""
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


def _run(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    torch.get_num_threads()  # without it MKL uses every core in a new thread, whatever was set
    failure: BaseException | None = None
    while (item := jobs.get()) is not None:
        job, future = item
        if failure is None:
            try:
                with torch.no_grad():
                    future.set_result(job())
                del item, job, future  # or this thread would keep its owner alive
                continue
            except BaseException as error:  # raised again where the future is awaited
                failure = error
        future.set_exception(failure)
        del item, job, future
