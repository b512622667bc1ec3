"""The kernels on CPUs, compiled by numba: one pass over memory, no GIL, no threads of their own.

Rows are cut into blocks; a block's codes (and random numbers) stay in the L1 cache between being
computed and being packed. A group's scale is computed when its first value is reached, so that
group and block sizes need not divide each other. Arrays travel as flat windows with a row stride.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import binding
from numba import njit
from torch import Tensor

from pipeline.wire.codec import Noise
from pipeline.wire.kernels import Codes
from pipeline.wire.kernels.vector_ir import (
    LANES,
    apply_group,
    bits_of,
    compiled,
    copy_planes,
    extremes,
    fill_codes,
    float_of,
    pack_block,
    philox_block,
    quantize_group,
    unpack_block,
)

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from pipeline.wire import kernels
    from pipeline.wire.kernels import KernelSet

_BLOCK, _PLANES, _LANES = 1024, 8, 128
_ROOM = _BLOCK + LANES  # a masked step may look past the end of a block
_INFINITY = np.uint32(0x7F800000)
_MASK64 = 0xFFFFFFFFFFFFFFFF

_Window = tuple[Any, int]  # a flat numpy array and the distance between rows in it
_NOTHING: _Window = (None, 0)
_STORED_AS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
}

if binding.get_host_cpu_features().get("f16c") is False and "x86" in binding.get_process_triple():
    raise ImportError('the numba kernels need a CPU with F16C; use kernels = "reference"')


def quantize(x_BN: Tensor, codes: Codes, *, noise: Noise | None) -> None:
    """Fill `codes`; see `KernelSet.quantize`."""
    rows, numel = x_BN.shape
    fresh = _kept(None, rows)
    _encode(_readable(x_BN), _NOTHING, fresh, *_code_windows(codes, numel), _words(noise, rows))


def dequantize(codes: Codes, out_BN: Tensor) -> None:
    """Write the values of codes and scales; see `KernelSet.dequantize`."""
    rows, numel = out_BN.shape
    into_BN = _writable(out_BN)
    _decode(*_code_windows(codes, numel), _NOTHING, _kept(None, rows), _window(into_BN))
    _hand_over(into_BN, out_BN)


def delta_encode(
    x_BN: Tensor, memory_BN: Tensor, codes: Codes, fresh_BN: Tensor, *, noise: Noise | None
) -> Tensor:
    """Quantize x - memory and write memory + change; see `KernelSet.delta_encode`."""
    rows, numel = x_BN.shape
    fresh, memory = _kept(fresh_BN, rows), _window(memory_BN)
    _encode(_readable(x_BN), memory, fresh, *_code_windows(codes, numel), _words(noise, rows))
    return torch.from_numpy(fresh[2])


def delta_decode(codes: Codes, memory_BN: Tensor, fresh_BN: Tensor, out_BN: Tensor) -> Tensor:
    """Write memory + change to both outputs; see `KernelSet.delta_decode`."""
    rows, numel = out_BN.shape
    fresh, into_BN = _kept(fresh_BN, rows), _writable(out_BN)
    _decode(*_code_windows(codes, numel), _window(memory_BN), fresh, _window(into_BN))
    _hand_over(into_BN, out_BN)
    return torch.from_numpy(fresh[2])


def _readable(x_BN: Tensor) -> _Window:
    x_BN = x_BN.detach()
    x_BN = x_BN if x_BN.dtype in _STORED_AS else x_BN.float()
    return _window(x_BN if x_BN.stride(1) == 1 else x_BN.contiguous())


def _writable(out_BN: Tensor) -> Tensor:
    if out_BN.dtype in _STORED_AS and out_BN.stride(1) == 1:
        return out_BN.detach()
    return torch.empty(out_BN.shape)


def _hand_over(into_BN: Tensor, out_BN: Tensor) -> None:
    if into_BN.data_ptr() != out_BN.data_ptr():
        out_BN.copy_(into_BN)


def _window(t_BN: Tensor) -> _Window:
    """The memory of the rows as one flat array, and the distance between rows in it."""
    rows, numel = t_BN.shape
    assert t_BN.stride(1) == 1 or numel <= 1, "rows must be contiguous"
    row = t_BN.stride(0)
    span = (rows - 1) * row + numel if rows and numel else 0
    stored = t_BN.view(_STORED_AS.get(t_BN.dtype, t_BN.dtype))
    return stored.as_strided((span,), (1,)).numpy(), row


def _code_windows(codes: Codes, numel: int) -> tuple[_Window, _Window, tuple[int, ...]]:
    """Payload, bytes of the scales, and (values, bits, group, scales are fp32)."""
    fp32 = int(codes.scale_BK.dtype == torch.float32)
    scale = _window(codes.scale_BK.view(torch.uint8))
    return _window(codes.payload_BP), scale, (numel, codes.bits, codes.group, fp32)


def _kept(fresh_BN: Tensor | None, rows: int) -> tuple[Any, int, Any]:
    """Where new memories go, and a flag per row for whether they are finite."""
    array, row = _NOTHING if fresh_BN is None else _window(fresh_BN)
    return array, row, np.empty(rows, np.bool_)


def _words(noise: Noise | None, rows: int) -> tuple[Any, Any, Any, Any]:
    """Room for a block's random numbers, and key, step and row numbers as integers."""
    if noise is None:
        return None, np.uint64(0), np.uint64(0), np.empty(rows, np.uint64)
    row_B = noise.row_B.to(torch.int64).contiguous().numpy().view(np.uint64)
    key, step = np.uint64(noise.key & _MASK64), np.uint64(noise.step & 0xFFFFFFFF)
    return np.empty(_ROOM, np.uint16), key, step, row_B


@njit(error_model="numpy")
def _group_step(high: Any, low: Any, half: Any, fp32: Any, stochastic: Any) -> Any:
    """Signed step of a group from the bit patterns of its extremes; see `reference._scale`."""
    large, small = float_of(max(high, low)), float_of(min(high, low))
    if max(high, low) >= _INFINITY:
        return np.float32(np.nan)
    half_up, half_down = np.float32(half + 0.5), np.float32(half - 0.5)
    if stochastic:
        step = max(large / np.float32(half), small / np.float32(half - 1))
    elif half <= 2:
        step = large / np.float32(half)
    else:
        step = max(large / half_up, small / half_down)
    word = bits_of(step)
    if not fp32:
        word = (word + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    if word < np.uint32(0x00800000):
        return np.float32(0.0)
    if word >= _INFINITY:
        return np.float32(np.nan)
    return float_of(word | np.uint32(0x80000000) if high > low else word)


@njit
def _store_scale(scale: Any, start: Any, step: Any, fp32: Any) -> Any:
    word = bits_of(step)
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
    value = float_of(np.uint32(word))
    return value if value == value else np.float32(np.nan)


@njit
def _block_bounds(block: Any, numel: Any) -> Any:
    """First value, end and lanes of a block."""
    first = block * _BLOCK
    last = min(first + _BLOCK, numel)
    return first, last, (last - first + _PLANES - 1) // _PLANES


@compiled
def _encode(
    x: Any, memory: Any, fresh: Any, payload: Any, scale: Any, shape: Any, noise: Any
) -> Any:
    rows, (numel, bits, group, fp32) = len(fresh[2]), shape
    random, key, noise_step, noise_rows = noise
    half, scale_nbytes = 1 << (bits - 1), 4 if fp32 else 2
    codes, spread = np.empty(_ROOM, np.uint8), np.empty(_ROOM, np.uint8)
    step, inverse = np.float32(0.0), np.float32(0.0)
    for row in range(rows):
        x_row, m_row, f_row = row * x[1], row * memory[1], row * fresh[1]
        largest = np.uint32(0)
        for block in range((numel + _BLOCK - 1) // _BLOCK):
            first, last, lanes = _block_bounds(block, numel)
            at = first
            philox_block(random, lanes, block * _LANES, (key, noise_rows[row], noise_step))
            while at < last:
                k = at // group
                end = min((k + 1) * group, last)
                if at == k * group:
                    size = min(group, numel - at)
                    high, low = extremes(x[0], memory[0], x_row + at, m_row + at, size)
                    step = _group_step(high, low, half, fp32, random is not None)
                    _store_scale(scale[0], row * scale[1] + k * scale_nbytes, step, fp32)
                    inverse = np.float32(1.0) / step if abs(step) > 0 else np.float32(0.0)
                x_at, m_at, f_at, count = x_row + at, m_row + at, f_row + at, end - at
                if inverse == 0:
                    fill_codes(codes, at - first, end - first, half)
                    unchanged = (at - first, m_at, f_at, 0, count, half, step)
                    kept = apply_group(codes, memory[0], fresh[0], None, unchanged)
                else:
                    changed = (x_at, m_at, f_at, at - first, count, half, step, inverse)
                    kept = quantize_group(x[0], memory[0], fresh[0], codes, random, changed)
                largest = max(largest, kept)
                at = end
            fill_codes(codes, last - first, lanes * _PLANES, 0)
            start = row * payload[1] + block * _LANES * bits
            if lanes == _LANES:
                pack_block(codes, payload[0], start, bits)
            else:
                copy_planes(codes, (0, lanes), spread, (0, _LANES), (_PLANES, lanes))
                pack_block(spread, codes, 0, bits)
                copy_planes(codes, (0, _LANES), payload[0], (start, lanes), (bits, lanes))
        fresh[2][row] = largest < _INFINITY


@compiled
def _decode(payload: Any, scale: Any, shape: Any, memory: Any, fresh: Any, out: Any) -> Any:
    rows, (numel, bits, group, fp32) = len(fresh[2]), shape
    half, scale_nbytes = 1 << (bits - 1), 4 if fp32 else 2
    codes, spread = np.empty(_ROOM, np.uint8), np.empty(_ROOM, np.uint8)
    for row in range(rows):
        m_row, f_row, o_row = row * memory[1], row * fresh[1], row * out[1]
        largest = np.uint32(0)
        for block in range((numel + _BLOCK - 1) // _BLOCK):
            first, last, lanes = _block_bounds(block, numel)
            at = first
            start = row * payload[1] + block * _LANES * bits
            if lanes == _LANES:
                unpack_block(payload[0], start, codes, bits)
            else:
                copy_planes(payload[0], (start, lanes), codes, (0, _LANES), (bits, lanes))
                unpack_block(codes, 0, spread, bits)
                copy_planes(spread, (0, _LANES), codes, (0, lanes), (_PLANES, lanes))
            while at < last:
                k = at // group
                end = min((k + 1) * group, last)
                step = _load_scale(scale[0], row * scale[1] + k * scale_nbytes, fp32)
                places = (at - first, m_row + at, f_row + at, o_row + at, end - at, half, step)
                kept = apply_group(codes, memory[0], fresh[0], out[0], places)
                largest = max(largest, kept)
                at = end
        fresh[2][row] = largest < _INFINITY


if TYPE_CHECKING:
    _checked: KernelSet = kernels.numba_cpu
