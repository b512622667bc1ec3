"""Bytes between the device that encodes them and host memory, where messages are sent from.

Host memory is pinned if the device is a GPU: copies are then direct, and overlap with compute.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def host_bytes(nbytes: int, device: torch.device) -> Tensor:
    """A buffer in host memory for bytes that `device` writes or reads."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


@contextlib.contextmanager
def written_on(device: torch.device, wire: Tensor) -> Iterator[Tensor]:
    """Yield `wire` (uint8, host), or a buffer on `device` that is copied to it when the block ends.

    Then everything that the block queued on its stream has finished.
    """
    if device.type == "cpu":
        yield wire
        return
    near = torch.empty_like(wire, device=device)
    yield near
    wire.copy_(near)


def brought_to(device: torch.device, wire: Tensor) -> Tensor:
    """The bytes of `wire` (host) on `device`, copied in the order of its stream."""
    return wire.to(device, non_blocking=True)
