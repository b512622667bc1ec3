"""Raises the first failure of any of a rank's threads where the schedule waits."""

import contextlib
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any, TypeVar

_T = TypeVar("_T")


class FirstError:
    """The first failure of all jobs that are watched.

    Waiting for one job alone could take forever: what it waits for may depend on a message that
    another one failed to send.
    """

    def __init__(self) -> None:
        self._failure: Future[None] = Future()

    def watch(self, job: "Future[_T]") -> "Future[_T]":
        """Take note if `job` fails; returns it."""
        job.add_done_callback(self._on_done)
        return job

    def check(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure.done():
            self._failure.result()

    def wait_for(self, job: "Future[_T]") -> _T:
        """The result of `job`, or the failure of whichever job failed first."""
        either: tuple[Future[Any], ...] = (job, self._failure)
        if not job.done():
            wait(either, return_when=FIRST_COMPLETED)
        if not job.done():
            self.check()
        return job.result()

    def _on_done(self, job: "Future[Any]") -> None:
        error = job.exception()
        if error is not None:
            with contextlib.suppress(InvalidStateError):  # it is not the first
                self._failure.set_exception(error)
