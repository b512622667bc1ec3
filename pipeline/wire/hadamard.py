"""The stateless codec: tiles, rotated where it helps, with bits moved to where errors are large.

After TAH-Quant: He et al., "TAH-Quant: Effective Activation Quantization in Pipeline Parallelism
over Slow Network", arXiv 2506.01352 v2 (its tiles, its bits per tile and its adaptive Hadamard
transform; no code is published). Both choices are made by rules of our own, which have no
thresholds to tune and leave the size of a message to its shape:

* A tile's error goes with its step, and its step with its peak (largest magnitude). So a tile is
  rotated (`kernels/hadamard.py`) if and only if that makes its peak smaller.
* One bit more makes a tile's squared error 4 times smaller, one bit less 4 times larger: it pays to
  move a bit from one tile to another whose peak is more than twice as large (3 times at 2 bits,
  as 1 bit is worse than that rule). Tiles are paired, largest peak with smallest and so on
  inwards, and the pairs for which it pays trade one bit.
* At 1 and 2 bits a tile is clipped at 2.25 times its root mean square: the finer step makes up for
  more than what is cut off. From 3 bits on it does not.

On the activations of a small language model rotation saves 5 to 8 % of the error at any number of
bits, on gradients trading another 20 to 25 %; `docs/activations.md` has the numbers, and why
there is no pivot swap. Rounding is to nearest.

A row of N values has K = ceil(N / 64) tiles, the last one padded with zeros, and becomes: three
bit maps of K bits (rotated, one bit more, one bit less; tile k in bit k % 8 of byte k // 8), K bf16
scales, and codes. Scales and codes come in the order of tiles with more bits, with `bits`, and with
fewer, each of the three with its codes laid out as in `kernels/__init__.py`. Scales come first.

Axes: B rows, N values per row, W bytes per row, K tiles, G values per tile, V bytes of a bit map.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import TILE, Codes, load, load_kernels
from thinpipe.pipeline.wire.kernels.bits import pack, unpack
from thinpipe.pipeline.wire.kernels.hadamard import Plan, TileKernels

_SCALE_NBYTES = 2  # bf16
_CLIP = 2.25
"""Times the rms, at 1 and 2 bits. At 2 bits forward training ends 0.0185 above fp32 so, 0.0217
without it (benchmarks/results/aqsgd_beyond_cpu_202611.md)."""
_Part = tuple[Tensor, Codes]
"""The values of a row's tiles with equally many bits, and their place in the message."""


class _Flags(NamedTuple):
    """What is done to each tile of a row (uint8); their order in the message follows from it."""

    turned_BK: Tensor
    raised_BK: Tensor
    lowered_BK: Tensor

    def plan(self) -> Plan:
        """Tiles with more bits first, those with fewer last."""
        kind_BK = 1 + self.lowered_BK.to(torch.int8) - self.raised_BK.to(torch.int8)
        if kind_BK.device.type == "cpu":  # numpy sorts bytes by counting, in a tenth of the time
            order_BK = torch.from_numpy(np.argsort(kind_BK.numpy(), axis=1, kind="stable"))
        else:
            order_BK = kind_BK.argsort(dim=1, stable=True)
        return Plan(order_BK.int(), self.turned_BK)


@dataclass(frozen=True)
class Hadamard:
    """`bits` per value on average over a row, one scale per tile of 64 values.

    Raises:
        ValueError: bits outside 2..7 (a tile has one more or less).
    """

    bits: int
    codec_id = 17

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 7:
            raise ValueError(f"bits = {self.bits}: use 2 to 7; tiles have one bit more or less")

    def capacity(self, numel: int) -> int:
        """Exact bytes of a row; bits that move between tiles do not change them."""
        tiles = _tiles(numel)
        return 3 * _map_nbytes(tiles) + tiles * (_SCALE_NBYTES + self.bits * TILE // 8)

    def encode(
        self, x_BN: Tensor, wire_BW: Tensor, seen_BN: Tensor | None = None, *, noise: Noise | None
    ) -> int:
        self._encode(x_BN, None, wire_BW)
        if seen_BN is not None:
            self.decode(wire_BW, seen_BN)
        return wire_BW.shape[1]

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        flags, tiles_BKG = self._received(wire_BW, out_BN)
        self._kernels(out_BN).scatter(tiles_BKG, flags.plan(), out_BN)

    def encode_change(
        self, x_BN: Tensor, cached: Cached, wire_BW: Tensor, *, noise: Noise | None
    ) -> Tensor:
        plan, tiles_BKG, parts = self._encode(x_BN, cached.old_BN, wire_BW)
        self._dequantize(parts, x_BN.device)
        return self._kernels(x_BN).scatter_change(tiles_BKG, plan, cached, None)

    def decode_change(self, wire_BW: Tensor, cached: Cached, out_BN: Tensor) -> Tensor:
        flags, tiles_BKG = self._received(wire_BW, out_BN)
        return self._kernels(out_BN).scatter_change(tiles_BKG, flags.plan(), cached, out_BN)

    def _encode(
        self, x_BN: Tensor, memory_BN: Tensor | None, wire_BW: Tensor
    ) -> tuple[Plan, Tensor, list[_Part]]:
        """Fill `wire_BW`; returns plan, room for the tiles, and its parts."""
        flags = self._flags(x_BN, memory_BN)
        plan = flags.plan()
        tiles_BKG = x_BN.new_empty((*plan.order_BK.shape, TILE), dtype=torch.float32)
        self._kernels(x_BN).gather(x_BN, memory_BN, plan, tiles_BKG)
        tiles, kernels = plan.order_BK.shape[1], load_kernels("auto", x_BN.device)
        scale_BK = x_BN.new_empty(plan.order_BK.shape, dtype=torch.bfloat16)
        parts = list(self._parts(flags, tiles_BKG, scale_BK, wire_BW))
        for part_1M, codes in parts:
            clipped_1M = _clipped(part_1M) if codes.bits <= 2 else part_1M
            kernels.quantize(clipped_1M, codes, noise=None)
        wire_BW[:, : 3 * _map_nbytes(tiles)] = torch.cat([pack(flag) for flag in flags], 1)
        wire_BW[:, self._scales(tiles)] = scale_BK.view(torch.uint8)
        return plan, tiles_BKG, parts

    def _received(self, wire_BW: Tensor, out_BN: Tensor) -> tuple[_Flags, Tensor]:
        rows, tiles = out_BN.shape[0], _tiles(out_BN.shape[1])
        maps_B3V = wire_BW[:, : 3 * _map_nbytes(tiles)].reshape(rows, 3, _map_nbytes(tiles))
        flags = _Flags(*(unpack(maps_B3V[:, i], tiles) for i in range(3)))
        scale_BK = out_BN.new_empty((rows, tiles), dtype=torch.bfloat16)
        scale_BK.view(torch.uint8).copy_(wire_BW[:, self._scales(tiles)])
        tiles_BKG = out_BN.new_empty((rows, tiles, TILE), dtype=torch.float32)
        self._dequantize(self._parts(flags, tiles_BKG, scale_BK, wire_BW), out_BN.device)
        return flags, tiles_BKG

    def _dequantize(self, parts: Iterable[_Part], device: torch.device) -> None:
        kernels = load_kernels("auto", device)
        for part_1M, codes in parts:
            kernels.dequantize(codes, part_1M)

    def _kernels(self, x_BN: Tensor) -> TileKernels:
        return cast(TileKernels, load("hadamard", device=x_BN.device))

    def _flags(self, x_BN: Tensor, memory_BN: Tensor | None) -> _Flags:
        rows, tiles = x_BN.shape[0], _tiles(x_BN.shape[1])
        peak_BK = x_BN.new_empty((rows, tiles), dtype=torch.float32)
        turned_BK = x_BN.new_empty((rows, tiles), dtype=torch.uint8)
        self._kernels(x_BN).survey(x_BN, memory_BN, peak_BK, turned_BK)
        ranked_BK = _sorted(peak_BK)
        low_BH, high_BH = ranked_BK[:, : tiles // 2], ranked_BK.flip(1)[:, : tiles // 2]
        traded_B1 = (high_BH > (3 if self.bits == 2 else 2) * low_BH).sum(1, keepdim=True)
        raised_BK = _smallest(-peak_BK, -ranked_BK.flip(1), traded_B1)
        return _Flags(turned_BK, raised_BK, _smallest(peak_BK, ranked_BK, traded_B1))

    def _parts(
        self, flags: _Flags, tiles_BKG: Tensor, scale_BK: Tensor, wire_BW: Tensor
    ) -> Iterator[_Part]:
        """The tiles of each row by their bits; a GPU is waited for, as counts are its own."""
        tiles = scale_BK.shape[1]
        for row, traded in enumerate(flags.raised_BK.sum(1).tolist()):
            at, k = self._scales(tiles).stop, 0
            counts = (traded, tiles - 2 * traded, traded)
            for bits, count in zip((self.bits + 1, self.bits, self.bits - 1), counts, strict=True):
                if count:
                    end = at + count * bits * TILE // 8
                    one, some = slice(row, row + 1), slice(k, k + count)
                    codes = Codes(wire_BW[one, at:end], scale_BK[one, some], bits, TILE)
                    yield tiles_BKG[one, some].flatten(1), codes
                    at, k = end, k + count

    @staticmethod
    def _scales(tiles: int) -> slice:
        start = 3 * _map_nbytes(tiles)
        return slice(start, start + _SCALE_NBYTES * tiles)


def _tiles(numel: int) -> int:
    return -(-numel // TILE)


def _sorted(x_BK: Tensor) -> Tensor:
    if x_BK.device.type == "cpu":  # numpy takes a fortieth of torch's time
        return torch.from_numpy(np.sort(x_BK.numpy(), axis=1))
    return torch.sort(x_BK, dim=1)[0]


def _smallest(x_BK: Tensor, ranked_BK: Tensor, count_B1: Tensor) -> Tensor:
    """Flags (uint8) of the smallest so many of each row; of equal ones, those that come first."""
    if not x_BK.shape[1]:
        return x_BK.to(torch.uint8)
    last_B1 = ranked_BK.gather(1, (count_B1 - 1).clamp_min(0))
    below_BK, equal_BK = x_BK < last_B1, x_BK == last_B1
    left_B1 = count_B1 - below_BK.sum(1, keepdim=True)
    chosen_BK = below_BK | (equal_BK & (equal_BK.cumsum(1) <= left_B1))
    return (chosen_BK & (count_B1 > 0)).to(torch.uint8)


def _clipped(x_1M: Tensor) -> Tensor:
    """Values limited to `_CLIP` times the root mean square of their tile.

    Sums are folded, so that every device adds in the same order, and relative to the peak, so that
    no square overflows or vanishes.
    """
    x_KG = x_1M.view(-1, TILE)
    peak_K1 = x_KG.abs().amax(1, keepdim=True)
    square_KG = (x_KG / peak_K1).square()
    while square_KG.shape[1] > 1:
        half = square_KG.shape[1] // 2
        square_KG = square_KG[:, :half] + square_KG[:, half:]
    limit_K1 = peak_K1 * (_CLIP * (square_KG * (1.0 / TILE)).sqrt())
    limit_K1 = torch.where(peak_K1 > 0, limit_K1, 0.0)
    return torch.where(x_KG.abs() > limit_K1, x_KG.sign() * limit_K1, x_KG).view_as(x_1M)


def _map_nbytes(tiles: int) -> int:
    return -(-tiles // 8)
