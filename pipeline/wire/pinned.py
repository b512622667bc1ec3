"""Bytes between the device that codes them and host memory, where messages are sent from.

Host memory is pinned where a GPU codes: copies then need no second one, and can run beside compute.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def host_bytes(nbytes: int, device: torch.device) -> Tensor:
    """Room in host memory for bytes that `device` writes or reads."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


@contextlib.contextmanager
def written_on(device: torch.device, wire: Tensor) -> Iterator[Tensor]:
    """Yields `wire` (uint8, host), or bytes on `device` that are copied to it when the block ends.

    Once left, everything that the block queued on its stream is done.
    """
    if device.type == "cpu":
        yield wire
        return
    near = torch.empty_like(wire, device=device)
    yield near
    wire.copy_(near)


def brought_to(device: torch.device, wire: Tensor) -> Tensor:
    """The bytes of `wire` (host) where `device` can read them, in order with its stream."""
    return wire.to(device, non_blocking=True)
