"""How a sample's coefficients are remembered: a byte each, and a second one for the widest.

Row: version of the basis (u32), index of the step (i32), low bytes of all K dimensions of all T
tokens, high bytes of the wide ones. A basis of D channels has at most D - wide dimensions, so that
rows are 8 + T D bytes whatever the basis.

Axes: T tokens, D channels, K dimensions, W wide dimensions.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.transform.basis import Basis
from thinpipe.pipeline.wire.codec import Noise

_HEAD = struct.Struct("<Ii")


class Held(NamedTuple):
    """What is remembered of a sample: whole numbers (int32) of steps in a basis."""

    version: int
    step: int
    q_TK: Tensor


def pack(held: Held, basis: Basis, numel: int) -> Tensor:
    """A row; numbers beyond its limits are clamped."""
    limit_K = basis.limits
    q_TK = held.q_TK.clamp(-limit_K, limit_K)
    row = torch.zeros(_HEAD.size + numel, dtype=torch.uint8)
    low, high = q_TK & 0xFF, (q_TK[:, : basis.wide] >> 8) & 0xFF
    head = _HEAD.pack(held.version, held.step)
    row[: _HEAD.size] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    end = _HEAD.size + low.numel()
    row[_HEAD.size : end] = low.flatten()
    row[end : end + high.numel()] = high.flatten()
    return row


def unpack(row: Tensor, bases: dict[int, Basis], tokens: int) -> Held:
    """What `pack` was given, within its limits."""
    version, step = _HEAD.unpack(row[: _HEAD.size].numpy().tobytes())
    basis = bases[version]
    dimensions, wide = basis.entry_DK.shape[1], basis.wide
    end = _HEAD.size + tokens * dimensions
    q_TK = row[_HEAD.size : end].view(torch.int8).view(tokens, dimensions).int()
    high_TW = row[end : end + tokens * wide].view(torch.int8).view(tokens, wide)
    q_TK[:, :wide] = (q_TK[:, :wide] & 0xFF) | high_TW.int() << 8
    return Held(version, step, q_TK)


@dataclass(frozen=True)
class RowCodec:
    """Tells memories how long rows are; what they hold is not theirs to know."""

    codec_id: int = 33
    bits: int = 8

    def capacity(self, numel: int) -> int:
        """Bytes of a row of a sample of `numel` values."""
        return _HEAD.size + numel

    def encode(
        self,
        x_BN: Tensor,
        wire_BW: Tensor,
        seen_BN: Tensor | None = None,
        *,
        noise: Noise | None = None,
    ) -> int:
        """Rows come packed."""
        raise NotImplementedError

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        """Rows need their basis."""
        raise NotImplementedError
