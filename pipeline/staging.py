"""Tensors between a stage's device and host memory, where messages are coded and sent.

On a GPU, copies go through pinned memory on a stream of their own, so that compute already queued
runs on meanwhile. On the CPU nothing is copied.
"""

import torch
from torch import Tensor


class Staging:
    """Copies for one stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, x: Tensor) -> Tensor:
        """Return `x`, which the current stream computes, in host memory, when it is there."""
        if self._stream is None:
            return x
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            host.copy_(x.detach(), non_blocking=True)
        x.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def to_device(self, x: Tensor) -> Tensor:
        """Return `x` on the device, for use by the current stream; does not wait."""
        if self._stream is None:
            return x
        pinned = x.pin_memory()
        with torch.cuda.stream(self._stream):
            moved = pinned.to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        moved.record_stream(current)
        return moved
