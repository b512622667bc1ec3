"""The tile kernels on CUDA, in Triton: same bits as the reference.

A program takes some tiles of one row. The transposition between the two halves of a rotation is
left to the store: until then the second butterflies run over neighbours 1, 2, 4, ... apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached
from thinpipe.pipeline.wire.kernels import with_contiguous_rows
from thinpipe.pipeline.wire.kernels.gpu.uniform import store_value
from thinpipe.pipeline.wire.kernels.hadamard import SIDE, Plan

_TILES = 16  # of a program
_SIDE = tl.constexpr(SIDE)
_LEVELS = tl.constexpr(SIDE.bit_length() - 1)
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_LIMIT = tl.constexpr(0x71800000)  # 2^100


def survey(x_BN: Tensor, memory_BN: Tensor | None, peak_BK: Tensor, turned_BK: Tensor) -> None:
    rows, tiles = peak_BK.shape
    x_BN, (memory_BN, has_memory) = with_contiguous_rows(x_BN), _given(memory_BN, x_BN)
    if rows and tiles:
        _survey_kernel[_grid(rows, tiles)](
            *(x_BN, memory_BN, peak_BK, turned_BK, x_BN.shape[1], tiles),
            *(x_BN.stride(0), memory_BN.stride(0), has_memory, _TILES),
            enable_fp_fusion=False,
        )


def gather(x_BN: Tensor, memory_BN: Tensor | None, plan: Plan, tiles_BKG: Tensor) -> None:
    rows, tiles, _ = tiles_BKG.shape
    x_BN, (memory_BN, has_memory) = with_contiguous_rows(x_BN), _given(memory_BN, x_BN)
    if rows and tiles:
        _gather_kernel[_grid(rows, tiles)](
            *(x_BN, memory_BN, *plan, tiles_BKG, x_BN.shape[1], tiles),
            *(x_BN.stride(0), memory_BN.stride(0), has_memory, _TILES),
            enable_fp_fusion=False,
        )


def scatter(tiles_BKG: Tensor, plan: Plan, out_BN: Tensor) -> None:
    _scatter(tiles_BKG, plan, None, out_BN)


def scatter_change(tiles_BKG: Tensor, plan: Plan, cached: Cached, out_BN: Tensor | None) -> Tensor:
    _scatter(tiles_BKG, plan, cached, out_BN)
    return torch.isfinite(cached.fresh_BN).all(1)


def _scatter(tiles_BKG: Tensor, plan: Plan, cached: Cached | None, out_BN: Tensor | None) -> None:
    rows, tiles, _ = tiles_BKG.shape
    into_BN = out_BN
    if out_BN is not None and (out_BN.dtype != torch.float32 or out_BN.stride(1) != 1):
        into_BN = torch.empty(out_BN.shape, device=out_BN.device)
    memory_BN, fresh_BN = cached or (None, None)
    given = [_given(one, tiles_BKG[:, 0]) for one in (memory_BN, fresh_BN, into_BN)]
    numel = next(one.shape[1] for one in (memory_BN, out_BN) if one is not None)
    if rows and tiles:
        _scatter_kernel[_grid(rows, tiles)](
            *(tiles_BKG, *plan, *(tensor for tensor, _ in given)),
            *(numel, tiles, *(tensor.stride(0) for tensor, _ in given)),
            *(*(exists for _, exists in given), _TILES),
            enable_fp_fusion=False,
        )
    if out_BN is not None and into_BN is not None and into_BN is not out_BN:
        out_BN.copy_(into_BN)


def _given(tensor: Tensor | None, instead: Tensor) -> tuple[Tensor, bool]:
    """What to pass to a kernel, and whether it may look at it."""
    return (instead, False) if tensor is None else (tensor, True)


def _grid(rows: int, tiles: int) -> tuple[int, int]:
    return triton.cdiv(tiles, _TILES), rows


@triton.jit
def _butterfly(x, TILES: tl.constexpr, SIZE: tl.constexpr, DISTANCE: tl.constexpr):
    """Sums and differences of values that are `DISTANCE` apart, in tiles [TILES, SIZE]."""
    pairs = tl.reshape(x, (TILES, SIZE // (2 * DISTANCE), 2, DISTANCE))
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (TILES, SIZE))


@triton.jit
def _rotate(x, TILES: tl.constexpr):
    """Rotate tiles, but for the transposition."""
    for level in tl.static_range(_LEVELS):
        x = _butterfly(x, TILES, _SIDE * _SIDE, _SIDE << level)
    for level in tl.static_range(_LEVELS):
        x = _butterfly(x, TILES, _SIDE * _SIDE, 1 << level)
    return x * (1.0 / _SIDE)  # exact: a power of two


@triton.jit
def _values(x_ptr, memory_ptr, offset, numel, x_row, memory_row, row, HAS_MEMORY: tl.constexpr):
    """x, or x - memory, in fp32; zeros behind the end."""
    x = tl.load(x_ptr + row * x_row + offset, offset < numel, other=0.0).to(tl.float32)
    if HAS_MEMORY:
        before = tl.load(memory_ptr + row * memory_row + offset, offset < numel, other=0.0)
        x = x - before.to(tl.float32)
    return x


@triton.jit
def _peak(x):
    """Bits of each tile's largest magnitude; infinity if a value is not finite."""
    word = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    return tl.minimum(tl.max(word, axis=1), _INFINITY)


@triton.jit
def _mine(tiles, TILES: tl.constexpr):
    """Row, this program's tiles, which of them exist, places in a tile, and the same transposed."""
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)  # offsets may pass 2^31
    inside = tl.arange(0, _SIDE * _SIDE)[None, :]
    return row, k, k < tiles, inside, inside % _SIDE * _SIDE + inside // _SIDE


@triton.jit
def _survey_kernel(
    x_ptr,
    memory_ptr,
    peak_ptr,
    turned_ptr,
    numel,
    tiles,
    x_row,
    memory_row,
    HAS_MEMORY: tl.constexpr,
    TILES: tl.constexpr,
):
    row, k, exists, inside, _ = _mine(tiles, TILES)
    offset = k[:, None] * (_SIDE * _SIDE) + inside
    x = _values(x_ptr, memory_ptr, offset, numel, x_row, memory_row, row, HAS_MEMORY)
    plain, rotated = _peak(x), _peak(_rotate(x, TILES))
    turn = (rotated < plain) & (plain < _LIMIT)
    peak = tl.where(turn, rotated, plain).to(tl.float32, bitcast=True)
    tl.store(peak_ptr + row * tiles + k, peak, exists)
    tl.store(turned_ptr + row * tiles + k, turn.to(tl.uint8), exists)


@triton.jit
def _gather_kernel(
    x_ptr,
    memory_ptr,
    order_ptr,
    turned_ptr,
    tiles_ptr,
    numel,
    tiles,
    x_row,
    memory_row,
    HAS_MEMORY: tl.constexpr,
    TILES: tl.constexpr,
):
    row, j, exists, inside, across = _mine(tiles, TILES)
    k = tl.load(order_ptr + row * tiles + j, exists, other=0).to(tl.int64)
    turned = tl.load(turned_ptr + row * tiles + k, exists, other=0)[:, None] != 0
    offset = k[:, None] * (_SIDE * _SIDE) + inside
    x = _values(x_ptr, memory_ptr, offset, numel, x_row, memory_row, row, HAS_MEMORY)
    value = tl.where(turned, _rotate(x, TILES), x)
    place = (row * tiles + j[:, None]) * (_SIDE * _SIDE) + tl.where(turned, across, inside)
    tl.store(tiles_ptr + place, value, exists[:, None] & (inside >= 0))  # true, of the right shape


@triton.jit
def _scatter_kernel(
    tiles_ptr,
    order_ptr,
    turned_ptr,
    memory_ptr,
    fresh_ptr,
    out_ptr,
    numel,
    tiles,
    memory_row,
    fresh_row,
    out_row,
    HAS_MEMORY: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    HAS_OUT: tl.constexpr,
    TILES: tl.constexpr,
):
    row, j, exists, inside, across = _mine(tiles, TILES)
    k = tl.load(order_ptr + row * tiles + j, exists, other=0).to(tl.int64)
    turned = tl.load(turned_ptr + row * tiles + k, exists, other=0)[:, None] != 0
    source = (row * tiles + j[:, None]) * (_SIDE * _SIDE) + inside
    x = tl.load(tiles_ptr + source, exists[:, None] & (inside >= 0), other=0.0)  # true, for a shape
    value = tl.where(turned, _rotate(x, TILES), x)
    offset = k[:, None] * (_SIDE * _SIDE) + tl.where(turned, across, inside)
    within = exists[:, None] & (offset < numel)
    if HAS_MEMORY:
        before = tl.load(memory_ptr + row * memory_row + offset, within, other=0.0)
        value = before.to(tl.float32) + value
    if HAS_FRESH:
        store_value(fresh_ptr + row * fresh_row + offset, value, within)
    if HAS_OUT:
        tl.store(out_ptr + row * out_row + offset, value, within)
