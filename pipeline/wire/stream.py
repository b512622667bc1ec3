"""A thread's own stream on the device that computes, and how it keeps step with the compute.

On a GPU, what couriers and exchanges code and copy runs on streams of their own. Threads that queue
compute only record events and queue waits for events: they never wait themselves, and neither does
compute that does not need the result. On the CPU there are no streams, and nothing here does
anything.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

CudaEvent = torch.cuda.Event | None
"""When a stream has come so far; None on the CPU."""


class SideStream:
    """The stream of one courier, or of one communication thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def now(self) -> CudaEvent:
        """When all that the calling thread has queued is done."""
        if self._stream is None:
            return None
        moment: CudaEvent = torch.cuda.current_stream(self._device).record_event()
        return moment

    @contextlib.contextmanager
    def after(self, moment: CudaEvent) -> Iterator[None]:
        """Inside, the calling thread queues on this lane, behind `moment`.

        Tensors of other streams that are used inside must live until that use is over.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if moment is not None:
                self._stream.wait_event(moment)
            yield

    def wait(self, moment: CudaEvent) -> None:
        """Have what the calling thread queues from here on wait for `moment`, not the thread."""
        if moment is not None:
            torch.cuda.current_stream(self._device).wait_event(moment)

    def hand_over(self, x: Tensor, there: CudaEvent) -> Tensor:
        """Return `x`, which was made on this lane, for the calling thread to use and drop."""
        self.wait(there)
        if there is not None:
            x.record_stream(torch.cuda.current_stream(self._device))
        return x
