"""The tile kernels on CPUs, compiled by numba: one pass over memory, no GIL.

A tile is widened into a buffer that stays in the L1 cache, rotated there and written out. The
innermost loops run over R neighbours, which the compiler turns into vectors.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled
from thinpipe.pipeline.wire.kernels.cpu.llvm.vector_ir import float_of
from thinpipe.pipeline.wire.kernels.reference.hadamard import LARGEST_TURNED

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from thinpipe.pipeline.wire.kernels.cpu import hadamard as hadamard_cpu
    from thinpipe.pipeline.wire.kernels.hadamard import TileKernels

_INFINITY, _MAGNITUDE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)
_LIMIT = np.float32(LARGEST_TURNED)


def survey(x_BN: Tensor, tile: int, peak_BK: Tensor, turned_BK: Tensor) -> None:
    """Write each tile's smaller peak and whether it is the rotated one's."""
    _survey(_readable(x_BN), math.isqrt(tile), peak_BK.numpy(), turned_BK.numpy())


def gather(x_BN: Tensor, order_BK: Tensor, turned_BK: Tensor, tiles_BKG: Tensor) -> None:
    """Write tiles in the order given, rotated where they are turned."""
    side = math.isqrt(tiles_BKG.shape[2])
    _gather(_readable(x_BN), side, order_BK.numpy(), turned_BK.numpy(), tiles_BKG.numpy())


def scatter(tiles_BKG: Tensor, order_BK: Tensor, turned_BK: Tensor, out_BN: Tensor) -> None:
    """Write tiles to their places, rotated back where they were turned."""
    side = math.isqrt(tiles_BKG.shape[2])
    into_BN = out_BN if out_BN.dtype == torch.float32 else torch.empty(out_BN.shape)
    _scatter(tiles_BKG.numpy(), side, order_BK.numpy(), turned_BK.numpy(), into_BN.numpy())
    if into_BN is not out_BN:
        out_BN.copy_(into_BN)


def _readable(x_BN: Tensor) -> Any:
    """fp32 values, or bf16 as the upper halves of such."""
    x_BN = x_BN.detach()
    if x_BN.dtype == torch.bfloat16:
        return x_BN.view(torch.uint16).numpy()
    return x_BN.float().numpy()


@njit
def _value(stored: Any) -> Any:
    if isinstance(stored, np.uint16):
        return float_of(np.uint32(stored) << np.uint32(16))
    return stored


@njit
def _load_tile(x_N: Any, first: Any, into: Any) -> Any:
    """Widen a tile; returns its largest magnitude, or infinity if a value is not finite."""
    count = min(into.size, x_N.size - first)
    for i in range(count):
        into[i] = _value(x_N[first + i])
    into[count:] = 0
    return _peak(into)


@njit
def _peak(tile: Any) -> Any:
    """The largest magnitude: as integers, bit patterns order alike, with NaN above infinity."""
    words, largest = tile.view(np.uint32), np.uint32(0)
    for i in range(words.size):
        largest = max(largest, words[i] & _MAGNITUDE)
    return float_of(min(largest, _INFINITY))


@njit
def _butterflies(tile: Any, side: Any) -> None:
    """Sums and differences of rows of the square 1, 2, 4, ... apart."""
    distance = side
    while distance < tile.size:
        for first in range(0, tile.size, 2 * distance):
            for i in range(first, first + distance):
                a, b = tile[i], tile[i + distance]
                tile[i], tile[i + distance] = a + b, a - b
        distance *= 2


@njit
def _rotate(tile: Any, side: Any, room: Any) -> None:
    _butterflies(tile, side)
    for i in range(side):
        for j in range(side):
            room[j * side + i] = tile[i * side + j]
    _butterflies(room, side)
    shrink = np.float32(1) / np.float32(side)
    for i in range(tile.size):
        tile[i] = room[i] * shrink


@compiled
def _survey(x_BN: Any, side: Any, peak_BK: Any, turned_BK: Any) -> None:
    tile, room = np.empty(side * side, np.float32), np.empty(side * side, np.float32)
    for row in range(peak_BK.shape[0]):
        for k in range(peak_BK.shape[1]):
            plain = _load_tile(x_BN[row], k * tile.size, tile)
            _rotate(tile, side, room)
            rotated = _peak(tile)
            turn = rotated < plain < _LIMIT
            peak_BK[row, k] = rotated if turn else plain
            turned_BK[row, k] = turn


@compiled
def _gather(x_BN: Any, side: Any, order_BK: Any, turned_BK: Any, tiles_BKG: Any) -> None:
    room = np.empty(side * side, np.float32)
    for row in range(order_BK.shape[0]):
        for j in range(order_BK.shape[1]):
            k, tile = order_BK[row, j], tiles_BKG[row, j]
            _load_tile(x_BN[row], k * tile.size, tile)
            if turned_BK[row, k]:
                _rotate(tile, side, room)


@compiled
def _scatter(tiles_BKG: Any, side: Any, order_BK: Any, turned_BK: Any, out_BN: Any) -> None:
    tile, room = np.empty(side * side, np.float32), np.empty(side * side, np.float32)
    for row in range(order_BK.shape[0]):
        for j in range(order_BK.shape[1]):
            k = order_BK[row, j]
            tile[:] = tiles_BKG[row, j]
            if turned_BK[row, k]:
                _rotate(tile, side, room)
            first = k * tile.size
            count = min(tile.size, out_BN.shape[1] - first)
            out_BN[row, first : first + count] = tile[:count]


if TYPE_CHECKING:
    _checked: TileKernels = hadamard_cpu
