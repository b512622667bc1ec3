"""How the change of a known sample is coded: in one pass, through any codec, or not at all.

`Uniform` meets `ChangeCodec` with fused kernels of its own.

Axes: B samples, N values of a sample, W bytes of a sample.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipeline.wire.codec import Codec, Noise

_DELTA, _ANEW = 0, 1


class ChangeCodec(Protocol):
    """Codes x against a memory that both ends hold, and renews that memory at both alike."""

    @property
    def bits(self) -> int:
        """Bits per value, scales aside."""

    def nbytes(self, numel: int) -> int:
        """Exact bytes of a row of `numel` values."""

    def encode_change(
        self,
        x_BN: Tensor,
        memory_BN: Tensor,
        wire_BW: Tensor,
        fresh_BN: Tensor,
        *,
        noise: Noise | None,
    ) -> Tensor:
        """Write the bytes, and what memory becomes to `fresh_BN`.

        Returns, bool [B], whether all of a row's new memory is finite.
        """

    def decode_change(
        self, wire_BW: Tensor, memory_BN: Tensor, fresh_BN: Tensor, out_BN: Tensor
    ) -> Tensor:
        """Write the receiver's values to `out_BN`; otherwise as `encode_change`."""


@dataclass(frozen=True)
class Composed:
    """The change through any codec, then an addition in fp32."""

    codec: Codec

    @property
    def bits(self) -> int:
        """The codec's."""
        return self.codec.bits

    def nbytes(self, numel: int) -> int:
        """The codec's."""
        return self.codec.nbytes(numel)

    def encode_change(
        self,
        x_BN: Tensor,
        memory_BN: Tensor,
        wire_BW: Tensor,
        fresh_BN: Tensor,
        *,
        noise: Noise | None,
    ) -> Tensor:
        """See `ChangeCodec`."""
        change_BN = x_BN.float() - memory_BN.float()
        self.codec.encode(change_BN, wire_BW, noise=noise)
        return self.decode_change(wire_BW, memory_BN, fresh_BN, change_BN)

    def decode_change(
        self, wire_BW: Tensor, memory_BN: Tensor, fresh_BN: Tensor, out_BN: Tensor
    ) -> Tensor:
        """See `ChangeCodec`."""
        value_BN = torch.empty(out_BN.shape, device=out_BN.device)
        self.codec.decode(wire_BW, value_BN)
        value_BN = memory_BN.float() + value_BN
        out_BN.copy_(value_BN)
        fresh_BN.copy_(value_BN)
        return torch.isfinite(fresh_BN).all(1)


@dataclass(frozen=True)
class Switching:
    """The change, unless it is no smaller than the value itself: then the value, without memory.

    The sender decides for each sample and says so in the row's first byte. Whatever it decides a
    row is as long as the longer of the two, so that lengths need no message; the rest is zero.
    """

    delta: ChangeCodec
    anew: Codec

    @property
    def bits(self) -> int:
        """The delta codec's."""
        return self.delta.bits

    def nbytes(self, numel: int) -> int:
        """A byte that says which, and room for the longer one."""
        return 1 + max(self.delta.nbytes(numel), self.anew.nbytes(numel))

    def encode_change(
        self,
        x_BN: Tensor,
        memory_BN: Tensor,
        wire_BW: Tensor,
        fresh_BN: Tensor,
        *,
        noise: Noise | None,
    ) -> Tensor:
        """See `ChangeCodec`."""
        wire_BW.zero_()
        size_B = x_BN.float().norm(dim=1)
        change_B = (x_BN.float() - memory_BN.float()).norm(dim=1)
        wire_BW[:, 0] = torch.where(change_B < size_B, _DELTA, _ANEW)
        finite = []
        for row, wire_1W, how in self._rows(wire_BW, x_BN.shape[1]):
            x_1N, fresh_1N = x_BN[row : row + 1], fresh_BN[row : row + 1]
            drawn = None if noise is None else Noise(noise.key, noise.step, noise.row_B[[row]])
            if how == _DELTA:
                old_1N = memory_BN[row : row + 1]
                finite.append(
                    self.delta.encode_change(x_1N, old_1N, wire_1W, fresh_1N, noise=drawn)
                )
            else:
                self.anew.encode(x_1N, wire_1W, noise=drawn)
                finite.append(self._decode_anew(wire_1W, fresh_1N, torch.empty(fresh_1N.shape)))
        return torch.cat(finite)

    def decode_change(
        self, wire_BW: Tensor, memory_BN: Tensor, fresh_BN: Tensor, out_BN: Tensor
    ) -> Tensor:
        """See `ChangeCodec`."""
        finite = []
        for row, wire_1W, how in self._rows(wire_BW, out_BN.shape[1]):
            fresh_1N, out_1N = fresh_BN[row : row + 1], out_BN[row : row + 1]
            if how == _DELTA:
                old_1N = memory_BN[row : row + 1]
                finite.append(self.delta.decode_change(wire_1W, old_1N, fresh_1N, out_1N))
            else:
                finite.append(self._decode_anew(wire_1W, fresh_1N, out_1N))
        return torch.cat(finite)

    def _rows(self, wire_BW: Tensor, numel: int) -> list[tuple[int, Tensor, int]]:
        """(row, its bytes after the first, what they are)."""
        sizes = {_DELTA: self.delta.nbytes(numel), _ANEW: self.anew.nbytes(numel)}
        return [
            (row, wire_BW[row : row + 1, 1 : 1 + sizes[how]], how)
            for row, how in enumerate(wire_BW[:, 0].tolist())
        ]

    def _decode_anew(self, wire_1W: Tensor, fresh_1N: Tensor, out_1N: Tensor) -> Tensor:
        value_1N = torch.empty(out_1N.shape, device=out_1N.device)
        self.anew.decode(wire_1W, value_1N)
        out_1N.copy_(value_1N)
        fresh_1N.copy_(value_1N)
        return torch.isfinite(fresh_1N).all(1)
