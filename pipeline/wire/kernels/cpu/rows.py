"""One row of the CPU kernels: quantize or dequantize it, in one pass over memory.

A block's codes (and random numbers) stay in the L1 cache between being computed and being packed.
The scales of all groups that begin in a block are computed before its codes, so that group and
block sizes need not divide each other, and that a processor works on several groups at once: each
is a chain of dependent steps, from its extremes to a division. An array travels as (flat array,
place of the row's first value or byte).
"""

from typing import Any

import numpy as np
from numba import njit

from thinpipe.pipeline.wire.kernels.cpu.llvm.block_ir import (
    copy_planes,
    fill_codes,
    pack_block,
    philox_block,
    unpack_block,
)
from thinpipe.pipeline.wire.kernels.cpu.llvm.vector_ir import (
    LANES,
    apply_group,
    extremes,
    quantize_group,
)

BLOCK, PLANES, PLANE_LANES = 1024, 8, 128  # the layout in `kernels/__init__.py`
ROOM = BLOCK + LANES  # a masked step may look past the end of a block
INFINITY = np.uint32(0x7F800000)


@njit(error_model="numpy")
def _stored_step(step: Any, negative: Any, fp32: Any) -> Any:
    """A positive step as its format holds it: rounded up, 0 if too small, NaN if too large."""
    word = np.float32(step).view(np.uint32)
    if not fp32:
        word = np.uint32((word + 0xFFFF) & 0xFFFF0000)  # up: extremes stay in range
    if word < np.uint32(0x00800000):
        return np.float32(0.0)
    if word >= INFINITY:
        return np.float32(np.nan)
    return np.uint32(word | 0x80000000 if negative else word).view(np.float32)


@njit(error_model="numpy")
def _extreme_step(high: Any, low: Any, half: Any, fp32: Any, stochastic: Any) -> Any:
    """Signed step of a group from the bit patterns of its extremes; see `reference/uniform.py`."""
    large = np.uint32(max(high, low)).view(np.float32)
    small = np.uint32(min(high, low)).view(np.float32)
    if max(high, low) >= INFINITY:
        return np.float32(np.nan)
    half_up, half_down = np.float32(half + 0.5), np.float32(half - 0.5)
    if stochastic:
        step = max(large / np.float32(half), small / np.float32(half - 1))
    elif half <= 2:
        step = large / np.float32(half)
    else:
        step = max(large / half_up, small / half_down)
    return _stored_step(step, high > low, fp32)


@njit
def _store_scale(scale: Any, start: Any, step: Any, fp32: Any) -> Any:
    word = np.float32(step).view(np.uint32)
    if fp32:
        for i in range(4):
            scale[start + i] = np.uint8((word >> np.uint32(8 * i)) & np.uint32(0xFF))
    else:
        scale[start] = np.uint8((word >> np.uint32(16)) & np.uint32(0xFF))
        scale[start + 1] = np.uint8(word >> np.uint32(24))


@njit
def _load_scale(scale: Any, start: Any, fp32: Any) -> Any:
    """A scale; every NaN becomes the canonical one, which roundings keep a NaN."""
    word = np.uint32(scale[start]) | np.uint32(scale[start + 1]) << np.uint32(8)
    if fp32:
        word |= np.uint32(scale[start + 2]) << np.uint32(16)
        word |= np.uint32(scale[start + 3]) << np.uint32(24)
    else:
        word = word << np.uint32(16)
    value = np.uint32(word).view(np.float32)
    return value if value == value else np.float32(np.nan)


@njit
def _block_bounds(block: Any, numel: Any) -> Any:
    """First value, end and lanes of a block."""
    first = block * BLOCK
    last = min(first + BLOCK, numel)
    return first, last, (last - first + PLANES - 1) // PLANES


@njit(error_model="numpy")
def _measure_groups(
    x: Any, memory: Any, scale: Any, rule: Any, groups: Any, stochastic: Any, steps: Any
) -> None:
    """Write scales and `steps` of the groups from `groups[0]` up to `groups[1]`."""
    (x_values, x_place), (m_values, m_place), (scales, scale_place) = x, memory, scale
    numel, bits, group, fp32 = rule
    half, scale_nbytes = 1 << (bits - 1), 4 if fp32 else 2
    for k in range(groups[0], groups[1]):
        start = k * group
        size, x_at, m_at = min(group, numel - start), x_place + start, m_place + start
        high, low = extremes(x_values, m_values, x_at, m_at, size)
        step = _extreme_step(high, low, half, fp32, stochastic)
        _store_scale(scales, scale_place + k * scale_nbytes, step, fp32)
        steps[k - groups[0]] = step


@njit(error_model="numpy", inline="always")
def encode_row(x: Any, memory: Any, fresh: Any, into: Any, rule: Any, noise: Any, room: Any) -> Any:
    """Quantize x - memory.

    Returns the largest bit pattern of the new memory.

    `into` = (payload, scales), both with their places; `rule` = (numel, bits, group, scales are
    fp32); `noise` = (room for a block, key, row number, step); `room` is for two blocks of codes,
    for what is largest in each lane, and for the steps of the groups in a block.
    """
    # arrays leave their tuples here: in a loop, numba would count references to each of them
    (x_values, x_place), (m_values, m_place), (f_values, f_place) = x, memory, fresh
    ((payload, payload_place), scale), (numel, bits, group, _) = into, rule
    random, key, row_number, noise_step = noise
    codes, spread, largest, steps = room
    half, k, end = 1 << (bits - 1), 0, 0
    step, inverse = np.float32(0.0), np.float32(0.0)
    largest[:] = 0
    for block in range((numel + BLOCK - 1) // BLOCK):
        first, last, lanes = _block_bounds(block, numel)
        at, begun = first, k
        philox_block(random, lanes, block * PLANE_LANES, (key, row_number, noise_step))
        groups = (begun, (last + group - 1) // group)
        _measure_groups(x, memory, scale, rule, groups, random is not None, steps)
        while at < last:
            if at >= end:
                step, k, end = steps[k - begun], k + 1, end + group
                inverse = np.float32(1.0) / step if abs(step) > 0 else np.float32(0.0)  # 0 for NaN
            stop = min(end, last)
            x_at, m_at, f_at, count = x_place + at, m_place + at, f_place + at, stop - at
            if inverse == 0:
                fill_codes(codes, at - first, stop - first, half)  # q = 0: a NaN is in the scale
                unchanged = (at - first, m_at, f_at, 0, count, half, step)
                apply_group(codes, m_values, f_values, None, largest, unchanged)
            else:
                changed = (x_at, m_at, f_at, at - first, count, half, step, inverse)
                quantize_group(x_values, m_values, f_values, codes, random, largest, changed)
            at = stop
        fill_codes(codes, last - first, lanes * PLANES, 0)  # padding: equal bytes everywhere
        start = payload_place + block * PLANE_LANES * bits
        if lanes == PLANE_LANES:
            pack_block(codes, payload, start, bits)
        else:
            copy_planes(codes, (0, lanes), spread, (0, PLANE_LANES), (PLANES, lanes))
            pack_block(spread, codes, 0, bits)
            copy_planes(codes, (0, PLANE_LANES), payload, (start, lanes), (bits, lanes))
    return largest.max()


@njit(inline="always")
def decode_row(source: Any, rule: Any, memory: Any, fresh: Any, out: Any, room: Any) -> Any:
    """Dequantize a row onto a memory; arguments and result are those of `encode_row`."""
    (m_values, m_place), (f_values, f_place), (o_values, o_place) = memory, fresh, out
    (payload, payload_place), (scale, scale_place) = source
    numel, bits, group, fp32 = rule
    codes, spread, largest = room
    half, scale_nbytes, k = 1 << (bits - 1), 4 if fp32 else 2, 0
    largest[:] = 0
    for block in range((numel + BLOCK - 1) // BLOCK):
        first, last, lanes = _block_bounds(block, numel)
        at = first
        start = payload_place + block * PLANE_LANES * bits
        if lanes == PLANE_LANES:
            unpack_block(payload, start, codes, bits)
        else:
            copy_planes(payload, (start, lanes), codes, (0, PLANE_LANES), (bits, lanes))
            unpack_block(codes, 0, spread, bits)
            copy_planes(spread, (0, PLANE_LANES), codes, (0, lanes), (PLANES, lanes))
        while at < last:
            stop = min((k + 1) * group, last)
            step = _load_scale(scale, scale_place + k * scale_nbytes, fp32)
            places = (at - first, m_place + at, f_place + at, o_place + at, stop - at, half, step)
            apply_group(codes, m_values, f_values, o_values, largest, places)
            at = stop
            k += at == (k + 1) * group  # a group may go on in the next block
    return largest.max()
