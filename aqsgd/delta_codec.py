"""How the change of a known sample is coded: in one pass, or through any codec.

`Uniform` meets `ChangeCodec` with fused kernels of its own.

Axes: B samples, N values of a sample, W bytes of a sample.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Codec, Noise
from thinpipe.pipeline.wire.uniform import PackedMemory


class ChangeCodec(Protocol):
    """Codes x against a memory that both ends hold, and renews that memory at both alike."""

    @property
    def bits(self) -> int:
        """Bits per value, scales aside."""

    def capacity(self, numel: int) -> int:
        """Exact bytes of a row of `numel` values."""

    def encode_change_packed(
        self, x_BN: Tensor, memory: PackedMemory, wire_BW: Tensor, *, noise: Noise | None
    ) -> Tensor:
        """Write the bytes, and what memory becomes to `memory.fresh_BW`.

        Returns, bool [B], whether all of a row's new memory is finite.
        """

    def decode_change_packed(self, wire_BW: Tensor, memory: PackedMemory, out_BN: Tensor) -> Tensor:
        """Write the receiver's values to `out_BN`; otherwise as `encode_change_packed`."""


@dataclass(frozen=True)
class Composed:
    """The change through any codec, then an addition in fp32."""

    codec: Codec

    @property
    def bits(self) -> int:
        return self.codec.bits

    def capacity(self, numel: int) -> int:
        return self.codec.capacity(numel)

    def encode_change_packed(
        self, x_BN: Tensor, memory: PackedMemory, wire_BW: Tensor, *, noise: Noise | None
    ) -> Tensor:
        change_BN = x_BN.float() - unpacked(memory, memory.old_BW, x_BN)
        self.codec.encode(change_BN, wire_BW, noise=noise)
        return self.decode_change_packed(wire_BW, memory, change_BN)

    def decode_change_packed(self, wire_BW: Tensor, memory: PackedMemory, out_BN: Tensor) -> Tensor:
        change_BN = torch.empty(out_BN.shape, device=out_BN.device)
        self.codec.decode(wire_BW, change_BN)
        return _renew(memory, unpacked(memory, memory.old_BW, out_BN) + change_BN, out_BN)


def unpacked(memory: PackedMemory, stored_BW: Tensor, like_BN: Tensor) -> Tensor:
    """fp32 values of stored rows, which are as long as those of `like_BN`."""
    value_BN = torch.empty(like_BN.shape, device=like_BN.device)
    memory.codec.decode(stored_BW, value_BN)
    return value_BN


def _renew(memory: PackedMemory, value_BN: Tensor, out_BN: Tensor) -> Tensor:
    """Hand values to the receiver and to memory; returns, bool [B], which rows are finite."""
    memory.codec.encode(value_BN, memory.fresh_BW, noise=None)
    out_BN.copy_(value_BN)
    return torch.isfinite(value_BN).all(1)
