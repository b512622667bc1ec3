"""The tile kernels on CUDA, in Triton: same bits as the reference.

A program takes some tiles of one row. The transposition between the two halves of a rotation is
left to the store: until then the second butterflies run over neighbours 1, 2, 4, ... apart.
"""

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinpipe.pipeline.wire.kernels import with_contiguous_rows

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from thinpipe.pipeline.wire.kernels.gpu import hadamard as hadamard_triton
    from thinpipe.pipeline.wire.kernels.hadamard import TileKernels

_VALUES = 1024  # of a program
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_LIMIT = tl.constexpr(0x71800000)  # 2^100


def survey(x_BN: Tensor, tile: int, peak_BK: Tensor, turned_BK: Tensor) -> None:
    """Write each tile's smaller peak and whether it is the rotated one's."""
    rows, tiles = peak_BK.shape
    x_BN = with_contiguous_rows(x_BN)
    if rows and tiles:
        _survey_kernel[_grid(rows, tiles, tile)](
            *(x_BN, peak_BK, turned_BK, x_BN.shape[1], tiles, x_BN.stride(0)),
            **_shape(tile),
            enable_fp_fusion=False,
        )


def gather(x_BN: Tensor, order_BK: Tensor, turned_BK: Tensor, tiles_BKG: Tensor) -> None:
    """Write tiles in the order given, rotated where they are turned."""
    rows, tiles, tile = tiles_BKG.shape
    x_BN = with_contiguous_rows(x_BN)
    if rows and tiles:
        _gather_kernel[_grid(rows, tiles, tile)](
            *(x_BN, order_BK, turned_BK, tiles_BKG, x_BN.shape[1], tiles, x_BN.stride(0)),
            **_shape(tile),
            enable_fp_fusion=False,
        )


def scatter(tiles_BKG: Tensor, order_BK: Tensor, turned_BK: Tensor, out_BN: Tensor) -> None:
    """Write tiles to their places, rotated back where they were turned."""
    rows, tiles, tile = tiles_BKG.shape
    direct = out_BN.dtype == torch.float32 and out_BN.stride(1) == 1
    into_BN = out_BN if direct else torch.empty(out_BN.shape, device=out_BN.device)
    if rows and tiles:
        _scatter_kernel[_grid(rows, tiles, tile)](
            *(tiles_BKG, order_BK, turned_BK, into_BN, out_BN.shape[1], tiles, into_BN.stride(0)),
            **_shape(tile),
            enable_fp_fusion=False,
        )
    if into_BN is not out_BN:
        out_BN.copy_(into_BN)


def _grid(rows: int, tiles: int, tile: int) -> tuple[int, int]:
    return triton.cdiv(tiles, _VALUES // tile), rows


def _shape(tile: int) -> dict[str, int]:
    side = math.isqrt(tile)
    return {"TILES": _VALUES // tile, "SIDE": side, "LEVELS": side.bit_length() - 1}


@triton.jit
def _butterfly(x, TILES: tl.constexpr, SIZE: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums and differences of values that are `DISTANCE` apart, in tiles [TILES, SIZE]."""
    pairs = tl.reshape(x, (TILES, SIZE // (2 * DISTANCE), 2, DISTANCE))
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (TILES, SIZE))


@triton.jit
def _rotate(x, TILES: tl.constexpr, SIDE: tl.constexpr, LEVELS: tl.constexpr):
    """Rotate tiles, but for the transposition."""
    for level in tl.static_range(LEVELS):
        x = _butterfly(x, TILES, SIDE * SIDE, SIDE << level)
    for level in tl.static_range(LEVELS):
        x = _butterfly(x, TILES, SIDE * SIDE, 1 << level)
    return x * (1.0 / SIDE)


@triton.jit
def _peak(x):
    """Bits of each tile's largest magnitude; infinity if a value is not finite."""
    word = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    return tl.minimum(tl.max(word, axis=1), _INFINITY)


@triton.jit
def _mine(tiles, TILES: tl.constexpr, SIDE: tl.constexpr):
    """Row, this program's tiles, which of them exist, places in a tile, and the same transposed."""
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    inside = tl.arange(0, SIDE * SIDE)[None, :]
    return row, k, k < tiles, inside, inside % SIDE * SIDE + inside // SIDE


@triton.jit
def _survey_kernel(
    x_ptr,
    peak_ptr,
    turned_ptr,
    numel,
    tiles,
    x_row,
    TILES: tl.constexpr,
    SIDE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row, k, exists, inside, _ = _mine(tiles, TILES, SIDE)
    offset = k[:, None] * (SIDE * SIDE) + inside
    x = tl.load(x_ptr + row * x_row + offset, offset < numel, other=0.0).to(tl.float32)
    plain, rotated = _peak(x), _peak(_rotate(x, TILES, SIDE, LEVELS))
    turn = (rotated < plain) & (plain < _LIMIT)
    peak = tl.where(turn, rotated, plain).to(tl.float32, bitcast=True)
    tl.store(peak_ptr + row * tiles + k, peak, exists)
    tl.store(turned_ptr + row * tiles + k, turn.to(tl.uint8), exists)


@triton.jit
def _gather_kernel(
    x_ptr,
    order_ptr,
    turned_ptr,
    tiles_ptr,
    numel,
    tiles,
    x_row,
    TILES: tl.constexpr,
    SIDE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row, j, exists, inside, across = _mine(tiles, TILES, SIDE)
    k = tl.load(order_ptr + row * tiles + j, exists, other=0).to(tl.int64)
    turned = tl.load(turned_ptr + row * tiles + k, exists, other=0)[:, None] != 0
    offset = k[:, None] * (SIDE * SIDE) + inside
    x = tl.load(x_ptr + row * x_row + offset, offset < numel, other=0.0).to(tl.float32)
    value = tl.where(turned, _rotate(x, TILES, SIDE, LEVELS), x)
    place = (row * tiles + j[:, None]) * (SIDE * SIDE) + tl.where(turned, across, inside)
    tl.store(tiles_ptr + place, value, exists[:, None] & (inside >= 0))


@triton.jit
def _scatter_kernel(
    tiles_ptr,
    order_ptr,
    turned_ptr,
    out_ptr,
    numel,
    tiles,
    out_row,
    TILES: tl.constexpr,
    SIDE: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row, j, exists, inside, across = _mine(tiles, TILES, SIDE)
    k = tl.load(order_ptr + row * tiles + j, exists, other=0).to(tl.int64)
    turned = tl.load(turned_ptr + row * tiles + k, exists, other=0)[:, None] != 0
    source = (row * tiles + j[:, None]) * (SIDE * SIDE) + inside
    x = tl.load(tiles_ptr + source, exists[:, None] & (inside >= 0), other=0.0)
    value = tl.where(turned, _rotate(x, TILES, SIDE, LEVELS), x)
    offset = k[:, None] * (SIDE * SIDE) + tl.where(turned, across, inside)
    tl.store(out_ptr + row * out_row + offset, value, exists[:, None] & (offset < numel))


if TYPE_CHECKING:
    _checked: TileKernels = hadamard_triton
