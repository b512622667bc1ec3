"""How a sample's coefficients are remembered: 8 + T D bytes, whatever K.

These are the version of the basis (u32), the index of the step (i32), and a byte for each of K
dimensions of T tokens.

Axes: T tokens, D channels, K dimensions.
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
    """A row, with what the basis remembers of the numbers."""
    row = torch.zeros(_HEAD.size + numel, dtype=torch.uint8)
    head = _HEAD.pack(held.version, held.step)
    row[: _HEAD.size] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    stored_TK = basis.remembered(held.q_TK)
    row[_HEAD.size : _HEAD.size + stored_TK.numel()] = stored_TK.flatten()
    return row


def unpack(row: Tensor, bases: dict[int, Basis], tokens: int) -> Held:
    """What is remembered of what `pack` was given."""
    version, step = _HEAD.unpack(row[: _HEAD.size].numpy().tobytes())
    basis = bases[version]
    end = _HEAD.size + tokens * basis.entry_DK.shape[1]
    stored_TK = row[_HEAD.size : end].view(tokens, -1)
    return Held(version, step, basis.recalled(stored_TK))


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
