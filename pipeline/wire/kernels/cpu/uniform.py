"""The kernels on CPUs, compiled by numba: one pass over memory, no GIL, no threads of their own.

Arrays travel as flat windows with a row stride.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import Codes
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled
from thinpipe.pipeline.wire.kernels.cpu.llvm.vector_ir import LANES
from thinpipe.pipeline.wire.kernels.cpu.rows import BLOCK, INFINITY, ROOM, decode_row, encode_row
from thinpipe.pipeline.wire.kernels.cpu.windows import (
    NOTHING,
    Window,
    hand_over,
    kept,
    readable,
    window,
    writable,
)

_MASK64 = 0xFFFFFFFFFFFFFFFF  # keys are any Python integers


def quantize(x_BN: Tensor, codes: Codes, *, noise: Noise | None) -> None:
    rows, numel = x_BN.shape
    into, words = _code_windows(codes, numel), _words(noise, rows)
    _encode(readable(x_BN), NOTHING, kept(None, rows), into, words)


def dequantize(codes: Codes, out_BN: Tensor) -> None:
    rows, numel = out_BN.shape
    source, into_BN = _code_windows(codes, numel), writable(out_BN)
    _decode(source, NOTHING, kept(None, rows), window(into_BN))
    hand_over(into_BN, out_BN)


def delta_encode(x_BN: Tensor, cached: Cached, codes: Codes, *, noise: Noise | None) -> Tensor:
    rows, numel = x_BN.shape
    memory, fresh = window(cached.old_BN), kept(cached.fresh_BN, rows)
    _encode(readable(x_BN), memory, fresh, _code_windows(codes, numel), _words(noise, rows))
    return torch.from_numpy(fresh[2])


def delta_decode(codes: Codes, cached: Cached, out_BN: Tensor) -> Tensor:
    rows, numel = out_BN.shape
    memory, fresh, into_BN = window(cached.old_BN), kept(cached.fresh_BN, rows), writable(out_BN)
    _decode(_code_windows(codes, numel), memory, fresh, window(into_BN))
    hand_over(into_BN, out_BN)
    return torch.from_numpy(fresh[2])


def _code_windows(codes: Codes, numel: int) -> tuple[Window, Window, tuple[int, int, int, int]]:
    """Payload, bytes of the scales, and (values, bits, group, scales are fp32)."""
    sizes = (codes.payload_BP.shape[1], codes.scale_BK.shape[1])
    assert sizes == (codes.bits * -(-numel // 8), -(-numel // codes.group)), "codes of another row"
    fp32 = int(codes.scale_BK.dtype == torch.float32)
    scale = window(codes.scale_BK.view(torch.uint8))
    return window(codes.payload_BP), scale, (numel, codes.bits, codes.group, fp32)


def _words(noise: Noise | None, rows: int) -> tuple[Any, Any, Any, Any]:
    """Room for a block's random numbers, and key, step and row numbers as integers."""
    if noise is None:
        return None, np.uint64(0), np.uint64(0), np.empty(rows, np.uint64)
    row_B = noise.row_B.to(torch.int64).contiguous().numpy().view(np.uint64)
    key, step = np.uint64(noise.key & _MASK64), np.uint64(noise.step & 0xFFFFFFFF)
    return np.empty(ROOM, np.uint16), key, step, row_B


@njit
def _row(rows: Any, row: Any) -> Any:
    """The array of a window, and where a row of it begins."""
    return rows[0], row * rows[1]


@compiled
def _encode(x: Any, memory: Any, fresh: Any, into: Any, noise: Any) -> Any:
    (payload, scale, rule), (random, key, noise_step, row_numbers) = into, noise
    codes, spread = np.empty(ROOM, np.uint8), np.empty(ROOM, np.uint8)
    steps = np.empty(BLOCK, np.float32)  # with groups of 1, one a value
    room = (codes, spread, np.empty(LANES, np.uint32), steps)
    for row in range(len(fresh[2])):
        values, old, new = _row(x, row), _row(memory, row), _row(fresh, row)
        target = _row(payload, row), _row(scale, row)
        numbers = random, key, row_numbers[row], noise_step
        largest = encode_row(values, old, new, target, rule, numbers, room)
        fresh[2][row] = largest < INFINITY


@compiled
def _decode(source: Any, memory: Any, fresh: Any, out: Any) -> Any:
    payload, scale, rule = source
    room = (np.empty(ROOM, np.uint8), np.empty(ROOM, np.uint8), np.empty(LANES, np.uint32))
    for row in range(len(fresh[2])):
        codes, old = (_row(payload, row), _row(scale, row)), _row(memory, row)
        largest = decode_row(codes, rule, old, _row(fresh, row), _row(out, row), room)
        fresh[2][row] = largest < INFINITY
