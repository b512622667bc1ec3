"""A thread's own CUDA stream, and how it is ordered with the streams that compute.

On a GPU, codecs and exchanges encode and copy on streams of their own. Threads that queue compute
only record events and queue waits for events: they never block, and neither does compute that does
not need the result. On the CPU there are no streams, and all of this is a no-op.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

CudaEvent = torch.cuda.Event | None
"""A point in a stream's work that can be waited for; None on the CPU."""


class SideStream:
    """The stream of one codec or communication thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def now(self) -> CudaEvent:
        """Record an event behind all that the calling thread has queued."""
        if self._stream is None:
            return None
        event: CudaEvent = torch.cuda.current_stream(self._device).record_event()
        return event

    @contextlib.contextmanager
    def after(self, event: CudaEvent) -> Iterator[None]:
        """Inside, the calling thread queues on this stream, behind `event`.

        Tensors of other streams that are used inside must live until that use is over.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield

    def wait(self, event: CudaEvent) -> None:
        """Have what the calling thread queues from now on wait for `event`; it does not block."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def hand_over(self, x: Tensor, done: CudaEvent) -> Tensor:
        """Return `x`, which was made on this stream, for the calling thread to use and free."""
        self.wait(done)
        if done is not None:
            x.record_stream(torch.cuda.current_stream(self._device))
        return x
