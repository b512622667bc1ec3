"""Tensors between a stage's device and host memory, where messages are coded and sent.

On a GPU, copies go through pinned memory on a stream of the courier's own. The schedule's thread
only records an event and queues a wait for one, so it never waits for a copy, and neither does
compute that does not need it. On the CPU nothing is copied, and there are no events.
"""

import torch
from torch import Tensor

Moment = torch.cuda.Event | None
"""When a stream has come so far; None on the CPU."""


class Staging:
    """Copies of one courier."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def now(self) -> Moment:
        """When all that the schedule's thread has queued is computed; for that thread to call."""
        if self._stream is None:
            return None
        moment: Moment = torch.cuda.current_stream(self._device).record_event()
        return moment

    def to_host(self, x: Tensor, computed: Moment) -> Tensor:
        """Wait until `x` is in host memory, and return it there; for the courier to call."""
        if self._stream is None or computed is None:
            return x
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            host.copy_(x, non_blocking=True)
        x.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def to_device(self, x: Tensor) -> tuple[Tensor, Moment]:
        """Begin to copy `x`; returns the copy and when it is there; for the courier to call."""
        if self._stream is None:
            return x, None
        with torch.cuda.stream(self._stream):
            moved = x.pin_memory().to(self._device, non_blocking=True)
            return moved, self._stream.record_event()

    def use(self, x: Tensor, there: Moment) -> Tensor:
        """Return `x`, for which what this thread queues from here on waits, but not the thread."""
        if there is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(there)
            x.record_stream(current)
        return x
