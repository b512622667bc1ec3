"""Whatever a tool does, steps are handed over at once and the end of a run comes."""

import logging
import threading
import time
from collections.abc import Mapping

import pytest

from thinpipe.launch.view.writers.writer import WriterThread


class Recorder:
    def __init__(self, *, fails_at: int | None = None, waits: threading.Event | None = None):
        self.steps: list[int] = []
        self.closed = False
        self._fails_at, self._waits = fails_at, waits

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._waits is not None:
            self._waits.wait()
        if step == self._fails_at:
            raise OSError(28, "No space left on device")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_all_steps_arrive_in_order_and_the_writer_is_closed() -> None:
    recorder = Recorder()
    with WriterThread("tool", lambda: recorder) as outlet:
        for step in range(100):
            outlet.add(step, {"loss": 1.0})
    assert recorder.steps == list(range(100))
    assert recorder.closed


def test_a_failure_is_one_warning_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(fails_at=3)
    with caplog.at_level(logging.WARNING), WriterThread("tool", lambda: recorder) as outlet:
        for step in range(1, 50):
            outlet.add(step, {})
    assert recorder.steps == [1, 2]
    (message,) = caplog.messages
    assert message.startswith("warning: tool: [Errno 28] No space left on device; it gets no more")


def test_a_tool_that_cannot_be_opened_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Recorder:
        raise RuntimeError("no such server\nand more")

    with WriterThread("tool", fail) as outlet:
        outlet.add(1, {})
    assert len(caplog.messages) == 1
    assert "no such server; it gets" in caplog.messages[0]


def test_a_tool_that_hangs_holds_up_neither_steps_nor_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hangs, began_s = threading.Event(), time.monotonic()
    with WriterThread("tool", lambda: Recorder(waits=hangs), close_s=0.1) as outlet:
        for step in range(20_000):  # more than may wait
            outlet.add(step, {})
    assert time.monotonic() - began_s < 10
    hangs.set()
    assert len(caplog.messages) == 1
    assert "does not keep up" in caplog.messages[0]


def test_an_end_that_takes_too_long_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    hangs = threading.Event()
    with WriterThread("tool", lambda: Recorder(waits=hangs), close_s=0.1) as outlet:
        outlet.add(1, {})
    hangs.set()
    assert "did not finish within 0 s" in caplog.text
