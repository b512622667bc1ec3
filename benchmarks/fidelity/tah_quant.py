"""TAH-Quant, the best published codec of activations without history, to be compared with.

He et al., "TAH-Quant: Effective Activation Quantization in Pipeline Parallelism over Slow Network",
arXiv 2506.01352 v2, section 3. From its mathematics:

* A token is cut into tiles of G = 64 neighbouring channels; a tile a has a scale and a zero-point.
* With p_k = |a_k| / sum |a|, the share `raised` (0.8) of a sample's tiles with the largest entropy
  -sum p_k log p_k has 4 bits, the others have 3.
* If the largest magnitude of a tile is more than `OUTLIER` (2) times the second, it changes places
  with the first value and the tile is rotated by a Hadamard matrix: the pivot is spread evenly.
* Values are rounded to the nearest of 2^b levels from the tile's minimum to its maximum.

Eq. (2) is printed without the minus sign of an entropy; its text means the entropy. The published
4.41 bits per value do not count whether a tile is rotated, and 16 bits of what is not said to be
fp16: bf16 here, as fp16 holds no small gradients. So 64 values take 40 bits besides their codes.

Bytes of a row with K tiles: bit maps of K bits (4 bits, rotated, then log2 G for the place of the
pivot, low bit first), K scales, K minima, and the codes as b bit maps: first those of 4 bits.

Axes: B rows, T tokens, D channels, N = T * D, K tiles of a row, G values of a tile, W bytes,
V bytes of a bit map.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.launch.components import Built
from thinpipe.pipeline.comm.boundary import Stateless
from thinpipe.pipeline.wire.codec import Codec, Noise
from thinpipe.pipeline.wire.kernels import load
from thinpipe.pipeline.wire.kernels.bits import pack, unpack
from thinpipe.pipeline.wire.kernels.hadamard import Plan, TileKernels
from thinpipe.pipeline.wire.kernels.reference.hadamard import LARGEST_TURNED
from thinpipe.pipeline.wire.told import DIRECTIONS, Direction

TILE = 64
OUTLIER = 2.0
_PLACE_BITS = TILE.bit_length() - 1
_LARGEST = torch.finfo(torch.bfloat16).max


class _Tiles(NamedTuple):
    """What is said of the tiles of each row: uint8 flags, places of pivots, bf16 ranges."""

    raised_BK: Tensor
    turned_BK: Tensor
    pivot_BK: Tensor
    scale_BK: Tensor
    least_BK: Tensor

    def order(self) -> Tensor:
        """Raised tiles first; int32."""
        return (1 - self.raised_BK).argsort(dim=1, stable=True).to(torch.int32)


@dataclass(frozen=True)
class TahQuant:
    """`bits` for a value, one more for the share `raised` of a sample's tiles.

    `width` is D: no tile spans two tokens; the last one of a token is padded with zeros.
    """

    width: int
    bits: int = 3
    raised: float = 0.8

    @property
    def codec_id(self) -> int:
        return 96

    def capacity(self, numel: int) -> int:
        """Exact: how many tiles are raised depends on their number only."""
        tiles = self._tiles(numel)
        maps = (2 + _PLACE_BITS) * _map_nbytes(tiles)
        codes = sum(bits * count for bits, count in self._parts(tiles)) * TILE // 8
        return maps + 4 * tiles + codes

    def encode(
        self,
        x_BN: Tensor,
        wire_BW: Tensor,
        seen_BN: Tensor | None = None,
        *,
        noise: Noise | None = None,
    ) -> int:
        x_BKG = self._cut(x_BN)
        tiles, y_BKG = self._survey(x_BKG)
        ordered_BKG = torch.take_along_dim(y_BKG, tiles.order().long().unsqueeze(2), 1)
        maps = [tiles.raised_BK, tiles.turned_BK]
        maps += [tiles.pivot_BK >> bit & 1 for bit in range(_PLACE_BITS)]
        ranges = [each.view(torch.uint8) for each in (tiles.scale_BK, tiles.least_BK)]
        codes = [
            pack(code_BM >> bit & 1)
            for bits, code_BM in self._codes(tiles, ordered_BKG)
            for bit in range(bits)
        ]
        torch.cat([*(pack(each) for each in maps), *ranges, *codes], 1, out=wire_BW)
        if seen_BN is not None:
            self.decode(wire_BW, seen_BN)
        return wire_BW.shape[1]

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        rows, numel = out_BN.shape
        count = self._tiles(numel)
        tiles, codes_BW = self._read(wire_BW, count)
        parts, start = [], 0
        for bits, part in self._parts(count):
            nbytes = part * TILE // 8
            code_BM = torch.zeros(rows, part * TILE, dtype=torch.uint8, device=wire_BW.device)
            for bit in range(bits):
                code_BM |= unpack(codes_BW[:, start : start + nbytes], part * TILE) << bit
                start += nbytes
            parts.append(code_BM.view(rows, part, TILE))
        place_BK1 = tiles.order().long().unsqueeze(2)
        level_BKG = torch.cat(parts, 1).float()
        scale_BK1, least_BK1 = (
            torch.take_along_dim(each.float().unsqueeze(2), place_BK1, 1)
            for each in (tiles.scale_BK, tiles.least_BK)
        )
        y_BKG = level_BKG * scale_BK1 + least_BK1
        plain_BN = torch.empty(rows, count * TILE, device=out_BN.device)
        _kernels(out_BN).scatter(y_BKG, Plan(tiles.order(), tiles.turned_BK), plain_BN)
        x_BKG = _swapped(plain_BN.view(rows, count, TILE), tiles)
        x_BTD = x_BKG.reshape(rows, -1, self._padded)[:, :, : self.width]
        out_BN.copy_(x_BTD.reshape(rows, -1))

    @property
    def _padded(self) -> int:
        return -(-self.width // TILE) * TILE

    def _tiles(self, numel: int) -> int:
        return numel // self.width * self._padded // TILE

    def _parts(self, tiles: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bits of the raised tiles and of the others, and how many there are of each."""
        raised = round(self.raised * tiles)
        return (self.bits + 1, raised), (self.bits, tiles - raised)

    def _cut(self, x_BN: Tensor) -> Tensor:
        x_BTD = x_BN.detach().float().reshape(x_BN.shape[0], -1, self.width)
        return F.pad(x_BTD, (0, self._padded - self.width)).reshape(x_BN.shape[0], -1, TILE)

    def _survey(self, x_BKG: Tensor) -> tuple[_Tiles, Tensor]:
        """What is said of tiles, and their values, rotated where an outlier asks for it."""
        size_BKG = x_BKG.abs()
        share_BKG = size_BKG / size_BKG.sum(2, keepdim=True).clamp_min(torch.finfo().tiny)
        entropy_BK = -(share_BKG * (share_BKG + torch.finfo().tiny).log()).sum(2)
        raised_BK = torch.zeros(x_BKG.shape[:2], dtype=torch.uint8, device=x_BKG.device)
        most = self._parts(x_BKG.shape[1])[0][1]
        raised_BK.scatter_(1, entropy_BK.argsort(dim=1, descending=True, stable=True)[:, :most], 1)
        largest_BK2, place_BK2 = size_BKG.topk(2, dim=2)
        first_BK, second_BK = largest_BK2.unbind(2)
        turned_BK = (first_BK > OUTLIER * second_BK) & (first_BK < LARGEST_TURNED)
        pivot_BK = (place_BK2[:, :, 0] * turned_BK).to(torch.uint8)
        nothing = torch.empty(0)
        tiles = _Tiles(raised_BK, turned_BK.to(torch.uint8), pivot_BK, nothing, nothing)
        y_BKG = _turned(x_BKG, tiles)
        low_BK, high_BK = y_BKG.amin(2), y_BKG.amax(2)
        least_BK = low_BK.clamp(-_LARGEST, _LARGEST).to(torch.bfloat16)
        steps_BK = 2 ** (self.bits + raised_BK) - 1.0
        scale_BK = (high_BK / steps_BK - least_BK.float() / steps_BK).clamp_max(_LARGEST)
        scale_BK = torch.where(torch.isfinite(first_BK), scale_BK, torch.nan)
        return tiles._replace(scale_BK=scale_BK.to(torch.bfloat16), least_BK=least_BK), y_BKG

    def _codes(self, tiles: _Tiles, ordered_BKG: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Bits and codes (uint8 [B, M values]) of the raised tiles, then of the others."""
        place_BK1, start = tiles.order().long().unsqueeze(2), 0
        for bits, count in self._parts(ordered_BKG.shape[1]):
            some = slice(start, start + count)
            scale_BK1, least_BK1 = (
                torch.take_along_dim(each.float().unsqueeze(2), place_BK1[:, some], 1)
                for each in (tiles.scale_BK, tiles.least_BK)
            )
            level_BKG = (ordered_BKG[:, some] - least_BK1) / scale_BK1
            level_BKG = level_BKG.nan_to_num(0.0).round().clamp(0, 2**bits - 1)
            yield bits, level_BKG.to(torch.uint8).flatten(1)
            start += count

    def _read(self, wire_BW: Tensor, count: int) -> tuple[_Tiles, Tensor]:
        """What a message says of its tiles, and the bytes of its codes."""
        nbytes = _map_nbytes(count)
        maps = [
            unpack(wire_BW[:, i * nbytes : (i + 1) * nbytes], count) for i in range(2 + _PLACE_BITS)
        ]
        pivot_BK = sum(
            (each << bit for bit, each in enumerate(maps[2:])), torch.zeros_like(maps[0])
        )
        rest_BW = wire_BW[:, len(maps) * nbytes :]
        scale_BK, least_BK = (
            rest_BW[:, 2 * i * count : 2 * (i + 1) * count].clone().view(torch.bfloat16)
            for i in range(2)
        )
        return _Tiles(maps[0], maps[1], pivot_BK, scale_BK, least_BK), rest_BW[:, 4 * count :]


def send_with(built: Built, codecs: Mapping[Direction, Codec]) -> None:
    """Give directions of all cuts of a run in one process another codec, without a memory.

    Plain evaluation stays as it is.
    """
    for stage in built.stages:
        for end in stage.channels.all():
            if (name := DIRECTIONS[end.codec.direction]) in codecs:
                other = Stateless(codecs[name])
                plain = end.codec.boundaries["eval"]
                end.codec.boundaries = {"train": other, "eval": plain, "eval_compressed": other}


def _kernels(x: Tensor) -> TileKernels:
    return cast(TileKernels, load("hadamard", "auto", x.device))


def _turned(x_BKG: Tensor, tiles: _Tiles) -> Tensor:
    """Tiles with their pivots in front, rotated, where that is said of them."""
    rows, count, _ = x_BKG.shape
    place_BK = torch.arange(count, dtype=torch.int32, device=x_BKG.device).repeat(rows, 1)
    y_BKG = torch.empty_like(x_BKG)
    swapped_BN = _swapped(x_BKG, tiles).flatten(1)
    _kernels(x_BKG).gather(swapped_BN, None, Plan(place_BK, tiles.turned_BK), y_BKG)
    return y_BKG


def _swapped(x_BKG: Tensor, tiles: _Tiles) -> Tensor:
    """The first value of each rotated tile and its pivot in each other's place."""
    pivot_BK1 = tiles.pivot_BK.long().unsqueeze(2)
    swapped_BKG = x_BKG.clone()
    swapped_BKG.scatter_(2, pivot_BK1, x_BKG[:, :, :1])
    swapped_BKG[:, :, :1] = torch.take_along_dim(x_BKG, pivot_BK1, 2)
    return swapped_BKG


def _map_nbytes(count: int) -> int:
    return -(-count // 8)
