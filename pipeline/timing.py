"""When work began and ended, in seconds of `time.perf_counter`, on any device.

A GPU computes after the call returns: marks are put into its queue and read once it reached them.
"""

import time
from collections.abc import Sequence

import torch

Mark = float | torch.cuda.Event
"""A point in time, which on a GPU may still lie ahead."""


class Stopwatch:
    """Marks points in the calling thread's work on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        """When all that the calling thread has queued on the device so far is done."""
        return self._queued() if self._device.type == "cuda" else time.perf_counter()

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """When the marks were reached; waits for a GPU to reach all that is queued."""
        if self._device.type != "cuda":
            return [float(mark) for mark in marks]  # type: ignore[arg-type]
        last = self._queued()
        last.synchronize()
        now_s = time.perf_counter()
        return [now_s - 1e-3 * mark.elapsed_time(last) for mark in marks]  # type: ignore[union-attr]

    def _queued(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
