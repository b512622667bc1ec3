"""Hands steps to a tool in a thread: neither its waits nor its failures reach the training."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Self

from thinpipe.launch.view.writers.writer import Writer

CLOSE_S = 30.0
"""How long the end of a run waits for a tool."""
_MOST_WAITING = 10_000

_log = logging.getLogger(__name__)


class WriterThread:
    """A tool, opened and fed by a thread of its own; a context manager around the training.

    A tool that fails, does not keep up, or does not finish within `close_s` seconds is a warning,
    and gets no more steps.
    """

    def __init__(
        self, tool: str, open_writer: Callable[[], Writer], *, close_s: float = CLOSE_S
    ) -> None:
        self._tool, self._open, self._close_s = tool, open_writer, close_s
        self._steps: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(
            _MOST_WAITING
        )
        self._over, self._giving_up = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"writer-{tool}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._over.is_set():
            return
        self._put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive() and not self._over.is_set():
            self._give_up(f"did not finish within {self._close_s:.0f} s")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if not self._over.is_set():
            self._put((step, values))

    def _put(self, item: tuple[int, Mapping[str, float]] | None) -> None:
        try:
            self._steps.put_nowait(item)
        except queue.Full:
            self._give_up(f"does not keep up, {_MOST_WAITING:,} steps wait")

    def _run(self) -> None:
        try:
            writer = self._open()
            while (item := self._steps.get()) is not None and not self._over.is_set():
                writer.write(*item)
            writer.close()
        except Exception as error:  # whatever another tool raises must not end the training
            self._give_up(str(error) or type(error).__name__)

    def _give_up(self, reason: str) -> None:
        with self._giving_up:
            if self._over.is_set():
                return
            first = reason.strip().splitlines()[0]
            _log.warning(
                "warning: %s: %s; it gets no more steps, metrics.jsonl does", self._tool, first
            )
            self._over.set()  # after the warning: whoever sees it may end the process
