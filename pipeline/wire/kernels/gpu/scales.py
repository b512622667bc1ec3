"""The scales of groups on CUDA, in Triton: 1024 values per program, with or without a memory."""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NOT_A_NUMBER = tl.constexpr(0x7FC00000)


@triton.jit
def difference(x_ptr, m_ptr, place, mask, DELTA: tl.constexpr):
    """Values at `place` = offsets in x and in m, less the memory."""
    value = tl.load(x_ptr + place[0], mask, other=0.0).to(tl.float32)
    if DELTA:
        value = value - tl.load(m_ptr + place[1], mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _stored_step(step, bad, negative, FP32: tl.constexpr):
    """Bits of a signed step as its format holds it; see `_scale` in `reference/uniform.py`."""
    word = step.to(tl.int32, bitcast=True)
    if not FP32:
        word = (word.to(tl.int64) + 0xFFFF >> 16 << 16).to(tl.int32)  # NaN would leave int32
    bad = bad | (word >= _INFINITY)
    signed = tl.where(negative, word | -2147483648, word)  # the sign bit, as int32 has it
    kept = tl.where(word < 0x00800000, 0, signed)
    return tl.where(bad, _NOT_A_NUMBER, kept)


@triton.jit
def _extreme_step(high, low, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, FP32: tl.constexpr):
    """Bits of the signed step from the bits of the group's extremes."""
    HALF: tl.constexpr = 2.0 ** (BITS - 1)
    largest = tl.maximum(high, low)
    large = largest.to(tl.float32, bitcast=True)
    small = tl.minimum(high, low).to(tl.float32, bitcast=True)
    one = tl.full(large.shape, 1.0, tl.float32)
    if STOCHASTIC:
        step = tl.maximum(tl.div_rn(large, one * HALF), tl.div_rn(small, one * (HALF - 1)))
    elif BITS <= 2:
        step = tl.div_rn(large, one * HALF)
    else:
        step = tl.maximum(
            tl.div_rn(large, one * (HALF + 0.5)), tl.div_rn(small, one * (HALF - 0.5))
        )
    return _stored_step(step, largest >= _INFINITY, high > low, FP32)


@triton.jit
def scale_kernel(
    x_ptr,
    m_ptr,
    scale_ptr,
    numel,
    x_row,
    m_row,
    scale_row,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    DELTA: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Store the steps of groups."""
    GROUPS: tl.constexpr = 1024 // CHUNK
    FP32: tl.constexpr = scale_ptr.dtype.element_ty == tl.float32
    row = tl.program_id(1).to(tl.int64)  # offsets may pass 2^31
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    high = tl.zeros((GROUPS,), tl.int32)
    low = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, GROUP, CHUNK):
        inside = start + tl.arange(0, CHUNK)[None, :]
        offset = group[:, None] * GROUP + inside
        mask = (inside < GROUP) & (offset < numel)
        place = (row * x_row + offset, row * m_row + offset)
        value = difference(x_ptr, m_ptr, place, mask, DELTA)
        word = value.to(tl.int32, bitcast=True)
        high = tl.maximum(high, tl.max(word, axis=1))
        # without the sign bit: this max is of signed numbers
        low = tl.maximum(low, tl.max(tl.where(word < 0, word & _MAGNITUDE, 0), axis=1))
    step = _extreme_step(high, low, BITS, STOCHASTIC, FP32)
    if FP32:
        stored = step.to(tl.float32, bitcast=True)
    else:
        stored = (step >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(scale_ptr + row * scale_row + group, stored, mask=group * GROUP < numel)
