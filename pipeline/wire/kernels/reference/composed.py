"""Kernels made of other kernels, for backends where one pass over memory gains nothing.

Axes: B rows, N values.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.kernels import Codes, check_blocks, part_of, unit_blocks


class Quantize(Protocol):
    """`KernelSet.quantize`."""

    def __call__(
        self, x_BN: Tensor, codes: Codes, *, noise: Noise | None, blocks: range | None = None
    ) -> None:
        """Fill `codes`."""


class Dequantize(Protocol):
    """`KernelSet.dequantize`."""

    def __call__(self, codes: Codes, out_BN: Tensor, *, blocks: range | None = None) -> None:
        """Write the values of codes and scales."""


def check_unit(blocks: range | None, numel: int, *codes: Codes) -> None:
    """Refuse a part that cuts through a group; see `check_blocks`."""
    check_blocks(blocks, numel, unit=unit_blocks(numel, *(each.group for each in codes)))


def unpacked(dequantize: Dequantize, memory: Codes, like_BN: Tensor) -> Tensor:
    """All values of a quantized memory, in fp32."""
    value_BN = torch.empty(like_BN.shape, device=like_BN.device)
    dequantize(memory, value_BN)
    return value_BN


def mean(
    using: tuple[Quantize, Dequantize],
    shards: Sequence[Codes],
    codes: Codes,
    residual_BN: Tensor,
    *,
    noise: Noise | None,
    blocks: range | None,
) -> None:
    """Quantize the mean of shards and residual; see `KernelSet.mean`."""
    assert shards, "a mean needs at least one shard"
    quantize, dequantize = using
    check_unit(blocks, residual_BN.shape[1], codes, *shards)
    total_BN = unpacked(dequantize, shards[0], residual_BN)
    for shard in shards[1:]:
        total_BN += unpacked(dequantize, shard, residual_BN)
    total_BN = total_BN * torch.full_like(total_BN, 1.0 / len(shards)) + residual_BN
    quantize(total_BN, codes, noise=noise, blocks=blocks)
    values = part_of(blocks, residual_BN.shape[1], bits=codes.bits, group=codes.group).values
    residual_BN[:, values] = (total_BN - unpacked(dequantize, codes, residual_BN))[:, values]
