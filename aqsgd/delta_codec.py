"""How the change of a known sample is coded: in one pass, through any codec, or not at all.

`Uniform` meets `ChangeCodec` with fused kernels of its own.

Axes: B samples, N values of a sample, W bytes of a sample.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Codec, Noise
from thinpipe.pipeline.wire.uniform import PackedMemory

_DELTA, _ANEW = 0, 1


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
        """The codec's."""
        return self.codec.bits

    def capacity(self, numel: int) -> int:
        """The codec's."""
        return self.codec.capacity(numel)

    def encode_change_packed(
        self, x_BN: Tensor, memory: PackedMemory, wire_BW: Tensor, *, noise: Noise | None
    ) -> Tensor:
        """See `ChangeCodec`."""
        change_BN = x_BN.float() - unpacked(memory, memory.old_BW, x_BN)
        self.codec.encode(change_BN, wire_BW, noise=noise)
        return self.decode_change_packed(wire_BW, memory, change_BN)

    def decode_change_packed(self, wire_BW: Tensor, memory: PackedMemory, out_BN: Tensor) -> Tensor:
        """See `ChangeCodec`."""
        change_BN = torch.empty(out_BN.shape, device=out_BN.device)
        self.codec.decode(wire_BW, change_BN)
        return _renew(memory, unpacked(memory, memory.old_BW, out_BN) + change_BN, out_BN)


@dataclass(frozen=True)
class Switching:
    """The change, unless it is no smaller than the value itself: then the value, without memory.

    The sender decides for each sample; the row's first byte is its decision. Whatever it decides a
    row is as long as the longer of the two, so that lengths need no message; the rest is zero.
    """

    delta: ChangeCodec
    direct: Codec

    @property
    def bits(self) -> int:
        """The delta codec's."""
        return self.delta.bits

    def capacity(self, numel: int) -> int:
        """A byte that says which, and room for the longer one."""
        return 1 + max(self.delta.capacity(numel), self.direct.capacity(numel))

    def encode_change_packed(
        self, x_BN: Tensor, memory: PackedMemory, wire_BW: Tensor, *, noise: Noise | None
    ) -> Tensor:
        """See `ChangeCodec`."""
        wire_BW.zero_()
        change_BN = x_BN.float() - unpacked(memory, memory.old_BW, x_BN)
        smaller_B = change_BN.norm(dim=1) < x_BN.float().norm(dim=1)
        wire_BW[:, 0] = torch.where(smaller_B, _DELTA, _ANEW)
        finite = []
        for row, how in enumerate(wire_BW[:, 0].tolist()):
            x_1N, wire_1W = x_BN[row : row + 1], self._slot(wire_BW, row, x_BN.shape[1])
            drawn = None if noise is None else Noise(noise.key, noise.step, noise.row_B[[row]])
            own = _row(memory, row)
            if how == _DELTA:
                finite.append(self.delta.encode_change_packed(x_1N, own, wire_1W, noise=drawn))
            else:
                self.direct.encode(x_1N, wire_1W, noise=drawn)
                finite.append(self._decode_direct(wire_1W, own, change_BN[row : row + 1]))
        return torch.cat(finite)

    def decode_change_packed(self, wire_BW: Tensor, memory: PackedMemory, out_BN: Tensor) -> Tensor:
        """See `ChangeCodec`."""
        finite = []
        for row, how in enumerate(wire_BW[:, 0].tolist()):
            out_1N, wire_1W = out_BN[row : row + 1], self._slot(wire_BW, row, out_BN.shape[1])
            decode = self.delta.decode_change_packed if how == _DELTA else self._decode_direct
            finite.append(decode(wire_1W, _row(memory, row), out_1N))
        return torch.cat(finite)

    def _slot(self, wire_BW: Tensor, row: int, numel: int) -> Tensor:
        """A row's bytes after the first, as many as its codec uses."""
        codec = self.delta if wire_BW[row, 0] == _DELTA else self.direct
        return wire_BW[row : row + 1, 1 : 1 + codec.capacity(numel)]

    def _decode_direct(self, wire_1W: Tensor, memory: PackedMemory, out_1N: Tensor) -> Tensor:
        value_1N = torch.empty(out_1N.shape, device=out_1N.device)
        self.direct.decode(wire_1W, value_1N)
        return _renew(memory, value_1N, out_1N)


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


def _row(memory: PackedMemory, row: int) -> PackedMemory:
    return PackedMemory(memory.codec, memory.old_BW[row : row + 1], memory.fresh_BW[row : row + 1])
