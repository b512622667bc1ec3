"""The tile kernels on CPUs, compiled by numba: one pass over memory, no GIL.

A tile is widened into a buffer that stays in the L1 cache, rotated in vector registers and written
out.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached
from thinpipe.pipeline.wire.kernels import TILE
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled
from thinpipe.pipeline.wire.kernels.cpu.llvm.run_ir import take_run
from thinpipe.pipeline.wire.kernels.cpu.llvm.tile_ir import add_run, turn_tile
from thinpipe.pipeline.wire.kernels.cpu.llvm.vector_ir import extremes
from thinpipe.pipeline.wire.kernels.cpu.windows import (
    NOTHING,
    hand_over,
    kept,
    readable,
    window,
    writable,
)
from thinpipe.pipeline.wire.kernels.hadamard import Plan
from thinpipe.pipeline.wire.kernels.reference.hadamard import LARGEST_TURNED

_INFINITY = np.uint32(0x7F800000)
_LIMIT = np.float32(LARGEST_TURNED).view(np.uint32)  # compared as bits: NaN is above all


def survey(x_BN: Tensor, memory_BN: Tensor | None, peak_BK: Tensor, turned_BK: Tensor) -> None:
    memory = NOTHING if memory_BN is None else window(memory_BN)
    _survey(readable(x_BN), memory, x_BN.shape[1], peak_BK.numpy(), turned_BK.numpy())


def gather(x_BN: Tensor, memory_BN: Tensor | None, plan: Plan, tiles_BKG: Tensor) -> None:
    memory = NOTHING if memory_BN is None else window(memory_BN)
    tiles = tiles_BKG.view(-1).numpy()
    _gather(readable(x_BN), memory, x_BN.shape[1], _arrays(plan), tiles)


def scatter(tiles_BKG: Tensor, plan: Plan, out_BN: Tensor) -> None:
    rows, numel = out_BN.shape
    tiles, into_BN = tiles_BKG.view(-1).numpy(), writable(out_BN)
    _scatter(tiles, numel, _arrays(plan), NOTHING, kept(None, rows), window(into_BN))
    hand_over(into_BN, out_BN)


def scatter_change(tiles_BKG: Tensor, plan: Plan, cached: Cached, out_BN: Tensor | None) -> Tensor:
    rows, numel = cached.old_BN.shape
    memory, fresh = window(cached.old_BN), kept(cached.fresh_BN, rows)
    into_BN = None if out_BN is None else writable(out_BN)
    out = NOTHING if into_BN is None else window(into_BN)
    _scatter(tiles_BKG.view(-1).numpy(), numel, _arrays(plan), memory, fresh, out)
    if out_BN is not None and into_BN is not None:
        hand_over(into_BN, out_BN)
    return torch.from_numpy(fresh[2])


def _arrays(plan: Plan) -> Any:
    return plan.order_BK.numpy(), plan.turned_BK.numpy()


@njit
def _load_tile(x: Any, memory: Any, starts: Any, count: Any, into: Any, at: Any) -> None:
    """Widen a tile of which `count` values exist; the rest are zeros."""
    if count < TILE:
        into[at : at + TILE] = 0
    take_run(x, memory, into, (starts[0], starts[1], at, count))


@njit
def _peak(tile: Any) -> Any:
    """Bits of the largest magnitude; NaN orders above infinity, and counts as infinity."""
    high, low = extremes(tile, None, 0, 0, TILE)
    return min(max(high, low), _INFINITY)


@compiled
def _survey(x: Any, memory: Any, numel: Any, peak_BK: Any, turned_BK: Any) -> None:
    # arrays leave their tuples here: in a loop, numba would count references to each of them
    (x_values, x_row), (m_values, m_row) = x, memory
    tile, room = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for row in range(peak_BK.shape[0]):
        x_at, m_at = row * x_row, row * m_row
        for k in range(peak_BK.shape[1]):
            first = k * TILE
            starts, count = (x_at + first, m_at + first), min(TILE, numel - first)
            _load_tile(x_values, m_values, starts, count, tile, 0)
            plain = _peak(tile)
            turn_tile(tile, room, (0, 0))
            rotated = _peak(room)
            turn = rotated < plain and plain < _LIMIT
            peak_BK[row, k] = np.uint32(rotated if turn else plain).view(np.float32)
            turned_BK[row, k] = turn


@compiled
def _gather(x: Any, memory: Any, numel: Any, plan: Any, tiles: Any) -> None:
    (x_values, x_row), (m_values, m_row), (order_BK, turned_BK) = x, memory, plan
    tile, place = np.empty(TILE, np.float32), 0
    for row in range(order_BK.shape[0]):
        x_at, m_at = row * x_row, row * m_row
        for j in range(order_BK.shape[1]):
            k = order_BK[row, j]
            first = np.int64(k) * TILE  # int32 ends at 2^31 values
            starts, count = (x_at + first, m_at + first), min(TILE, numel - first)
            if turned_BK[row, k]:
                _load_tile(x_values, m_values, starts, count, tile, 0)
                turn_tile(tile, tiles, (0, place))
            else:
                _load_tile(x_values, m_values, starts, count, tiles, place)
            place += TILE


@compiled
def _scatter(tiles: Any, numel: Any, plan: Any, memory: Any, fresh: Any, out: Any) -> None:
    (m_values, m_row), (f_values, f_row, finite_B), (o_values, o_row) = memory, fresh, out
    order_BK, turned_BK = plan
    room, largest, place = np.empty(TILE, np.float32), np.empty(TILE, np.uint32), 0
    for row in range(order_BK.shape[0]):
        m_at, f_at, o_at = row * m_row, row * f_row, row * o_row
        largest[:] = 0
        for j in range(order_BK.shape[1]):
            k = order_BK[row, j]
            first = np.int64(k) * TILE
            count = min(TILE, numel - first)
            places = (m_at + first, f_at + first, o_at + first, count)
            if turned_BK[row, k]:
                turn_tile(tiles, room, (place, 0))
                add_run(room, m_values, f_values, o_values, largest, (0, *places))
            else:
                add_run(tiles, m_values, f_values, o_values, largest, (place, *places))
            place += TILE
        finite_B[row] = largest.max() < _INFINITY
