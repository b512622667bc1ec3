"""The largest values of every tile of 4,096, in 12-bit indices and 1 or 2 bits per value.

DeMo (Peng, Quesnelle, Kingma 2024) and SparseLoCo (Sarfi et al. 2025) send so. A row of n values
holds, in order:

    head        at 2 bits: mean and 4 centroids, fp32
    indices     two in three bytes, `kept` per tile, in tiles of 4,096 (the last one padded)
    codes       8 or 4 in a byte, in the same order

At 1 bit only signs travel, and decode to 1 and -1. At 2 bits the chosen values of a row, less
their mean, are dealt into 4 bins of 1.5 standard deviations each, and decode to the mean of their
bin: the mean of what is decoded is that of what was chosen.

Axes: B rows, N values per row, W bytes per row, T tiles, K kept values of a tile, C of a row.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.kernels.bits import pack, unpack
from thinpipe.pipeline.wire.pinned import brought_to

TILE = 4096  # indices have 12 bits
_HEAD = 5  # fp32 numbers: a mean and the centroids
_BINS = 4  # codes of 2 bits


@dataclass(frozen=True)
class TileTopK:
    """Keeps `kept` values of each tile, an even number.

    A NaN or infinity among the chosen values makes all of them NaN at 2 bits; it is chosen if there
    is one, as it counts as the largest. At 1 bit it would be hidden: `encode` rejects it.

    Raises:
        ValueError: an odd number of values, or more than a tile has.
    """

    kept: int
    bits: Literal[1, 2]
    codec_id = 52

    def __post_init__(self) -> None:
        if not 2 <= self.kept <= TILE or self.kept % 2:
            raise ValueError(f"kept = {self.kept}: use an even number from 2 to {TILE}")

    def capacity(self, numel: int) -> int:
        count = self.kept * -(-numel // TILE)
        head = 4 * _HEAD if self.bits == 2 else 0
        return head + 3 * count // 2 + -(-count * self.bits // 8)

    def encode(
        self, x_BN: Tensor, wire_BW: Tensor, seen_BN: Tensor | None = None, *, noise: Noise | None
    ) -> int:
        """Write one row after the other.

        Raises:
            ValueError: at 1 bit a chosen value is not finite.
        """
        for row, x_N in enumerate(x_BN):
            self._encode(x_N, wire_BW[row])
            if seen_BN is not None:
                self._decode(wire_BW[row], seen_BN[row])
        return self.capacity(x_BN.shape[1])

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        for wire_W, out_N in zip(wire_BW, out_BN, strict=True):
            self._decode(wire_W, out_N)

    def add_to(self, wire_W: Tensor, sum_N: Tensor, count_N: Tensor) -> None:
        """Add a row's values to a sum, and 1 to the count of each place that has one.

        The bytes may be in host memory.
        """
        place_C, value_C = self._read(brought_to(sum_N.device, wire_W), sum_N.numel())
        inside = place_C < sum_N.numel()
        place_C, value_C = place_C[inside], value_C[inside]
        sum_N[place_C] += value_C  # no place twice
        count_N[place_C] += 1

    def _encode(self, x_N: Tensor, wire_W: Tensor) -> None:
        numel, tiles = x_N.numel(), -(-x_N.numel() // TILE)
        padded = torch.zeros(tiles * TILE, dtype=torch.float32, device=x_N.device)
        padded[:numel] = x_N
        size_TT = padded.view(tiles, TILE).abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        index_TK = size_TT.topk(self.kept, sorted=False).indices.sort().values
        value_C = padded.view(tiles, TILE).gather(1, index_TK).flatten()
        code_C, head = self._quantize(value_C)
        parts = (head, _pack_12(index_TK.flatten()), pack(code_C, self.bits))
        torch.cat(parts, out=wire_W[: self.capacity(numel)])

    def _quantize(self, value_C: Tensor) -> tuple[Tensor, Tensor]:
        if self.bits == 1:
            if not bool(value_C.isfinite().all()):
                raise ValueError("a value that is not finite has no sign to send")
            return (value_C < 0).to(torch.uint8), value_C.new_empty(0, dtype=torch.uint8)
        mean = value_C.mean()
        rest_C = value_C - mean
        width = 6 * rest_C.square().mean().sqrt() / _BINS
        code_C = (rest_C / width + _BINS / 2).nan_to_num_(nan=0).round().clamp_(0, _BINS - 1).long()
        count = torch.bincount(code_C, minlength=_BINS).clamp_(min=1)
        sums = torch.zeros(_BINS, device=value_C.device).index_add_(0, code_C, rest_C)
        head = torch.cat([mean[None], sums / count])
        return code_C.to(torch.uint8), head.view(torch.uint8)

    def _decode(self, wire_W: Tensor, out_N: Tensor) -> None:
        place_C, value_C = self._read(wire_W, out_N.numel())
        inside = place_C < out_N.numel()
        out_N.zero_()
        out_N[place_C[inside]] = value_C[inside].to(out_N.dtype)

    def _read(self, wire_W: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Places in the row (beyond its end: padding), and values."""
        if len(wire_W) < self.capacity(numel):
            raise CodingError(f"{len(wire_W)} bytes, where {self.capacity(numel)} are needed")
        tiles = -(-numel // TILE)
        count, head = self.kept * tiles, 4 * _HEAD if self.bits == 2 else 0
        indices, codes = wire_W[head : head + 3 * count // 2], wire_W[head + 3 * count // 2 :]
        tile_C = torch.arange(tiles, device=wire_W.device).repeat_interleave(self.kept)
        place_C = tile_C * TILE + _unpack_12(indices)
        code_C = unpack(codes[: -(-count * self.bits // 8)], count, self.bits)
        if self.bits == 1:
            return place_C, 1.0 - 2.0 * code_C
        mean, *centroids = wire_W[:head].clone().view(torch.float32)
        return place_C, torch.stack(centroids)[code_C.long()] + mean


def _pack_12(index_C: Tensor) -> Tensor:
    """Pairs (a, b) as a's low byte, a's high and b's low four bits, b's high byte."""
    first, second = index_C.view(-1, 2).unbind(1)
    middle = (first >> 8) | ((second & 15) << 4)
    return torch.stack([first & 255, middle, second >> 4], 1).to(torch.uint8).flatten()


def _unpack_12(packed: Tensor) -> Tensor:
    low, middle, high = packed.view(-1, 3).long().unbind(1)
    return torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], 1).flatten()
