"""Inputs of codecs, a way through them, and kernels other than those of their device."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from thinpipe.pipeline.wire import kernels
from thinpipe.pipeline.wire.codec import Codec, Noise


@contextlib.contextmanager
def using(backend: kernels.Backend) -> Iterator[None]:
    """Inside, all codecs on the CPU use this backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kernels._AUTO, "cpu", backend)
        yield


def values(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def rows(count: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))


def bursts(count: int, numel: int, seed: int = 0) -> torch.Tensor:
    """Stretches of very different size, as gradients have them, and some outliers."""
    x = rows(count, numel, seed)
    size = torch.exp(3 * rows(count, -(-numel // 80), seed + 1)).repeat_interleave(80, 1)
    x = x * size[:, :numel]
    x[:, ::511] *= 50
    return x


def through(
    codec: Codec, x: torch.Tensor, noise: Noise | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the peer decodes and what the sender expects it to; bytes start at an odd place."""
    message = torch.full((5 + len(x) * codec.capacity(x.shape[1]),), 0xAA, dtype=torch.uint8)
    wire = message[5:].view(len(x), codec.capacity(x.shape[1]))
    seen, out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    assert codec.encode(x, wire, seen, noise=noise) == wire.shape[1]
    codec.decode(wire, out)
    return out, seen
