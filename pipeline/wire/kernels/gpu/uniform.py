"""The kernels on CUDA, in Triton: same bytes as the reference.

A first launch finds the scales, 1024 values per program; a second one makes the codes, one block
per program as a tile of 8 planes and 128 lanes. The last, shorter block of a row is a launch of its
own, so that full blocks have constant strides and unmasked, vectorized loads. Functions on several
codes are composed: a GPU's memory is far faster than the links, and launches are few.

Products and sums must round once each on every device: launches set `enable_fp_fusion=False`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import Codes, with_contiguous_rows
from thinpipe.pipeline.wire.kernels.gpu.scales import difference, scale_kernel

_BLOCK = 1024  # the layout in `kernels/__init__.py`
_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def quantize(x_BN: Tensor, codes: Codes, *, noise: Noise | None) -> None:
    delta_encode(x_BN, None, codes, noise=noise)


def dequantize(codes: Codes, out_BN: Tensor) -> None:
    delta_decode(codes, None, out_BN)


def delta_encode(
    x_BN: Tensor, cached: Cached | None, codes: Codes, *, noise: Noise | None
) -> Tensor:
    payload_BP, scale_BK, bits, group = codes
    rows, numel = x_BN.shape
    x_BN = with_contiguous_rows(x_BN)
    # a kernel needs some pointer; without a memory it does not follow it
    m_BN, f_BN = (x_BN, x_BN) if cached is None else map(_memory, cached)
    finite_B = torch.ones(rows, dtype=torch.int32, device=x_BN.device)
    flags = {"BITS": bits, "GROUP": group, "DELTA": cached is not None}
    flags["STOCHASTIC"] = noise is not None
    strides = (x_BN.stride(0), m_BN.stride(0), scale_BK.stride(0))
    chunk = min(_BLOCK, triton.next_power_of_2(group))
    if rows and numel:
        scale_kernel[(triton.cdiv(numel, group * (_BLOCK // chunk)), rows)](
            *(x_BN, m_BN, scale_BK, numel, *strides), CHUNK=chunk, **flags, enable_fp_fusion=False
        )
    key, step, row_B = _words(noise, finite_B)
    for first, count, full in _launches(rows, numel):
        _encode_kernel[(count, rows)](
            *(x_BN, m_BN, scale_BK, payload_BP, f_BN, finite_B, row_B),
            *(first, numel, *strides, payload_BP.stride(0), f_BN.stride(0), key, step),
            **flags,
            FULL=full,
            enable_fp_fusion=False,
        )
    return finite_B.bool()


def delta_decode(codes: Codes, cached: Cached | None, out_BN: Tensor) -> Tensor:
    payload_BP, scale_BK, bits, group = codes
    rows, numel = out_BN.shape
    into_BN = with_contiguous_rows(out_BN)
    m_BN, f_BN = (into_BN, into_BN) if cached is None else map(_memory, cached)
    finite_B = torch.ones(rows, dtype=torch.int32, device=out_BN.device)
    tensors = (payload_BP, scale_BK, m_BN, f_BN, into_BN)
    strides = [tensor.stride(0) for tensor in tensors]
    for first, count, full in _launches(rows, numel):
        _decode_kernel[(count, rows)](
            *(*tensors, finite_B, first, numel, *strides),
            BITS=bits,
            GROUP=group,
            DELTA=cached is not None,
            FULL=full,
            enable_fp_fusion=False,
        )
    if into_BN is not out_BN:
        out_BN.copy_(into_BN)
    return finite_B.bool()


def _memory(memory_BN: Tensor) -> Tensor:
    assert memory_BN.stride(1) == 1 or memory_BN.shape[1] <= 1, "rows must be contiguous"
    return memory_BN


def _launches(rows: int, numel: int) -> list[tuple[int, int, bool]]:
    """(first block, number of blocks, whether they are full) of each launch."""
    full = numel // _BLOCK
    launches = [(0, full, True), (full, int(numel > full * _BLOCK), False)]
    return [launch for launch in launches if launch[1] and rows]


def _words(noise: Noise | None, unused_B: Tensor) -> tuple[int, int, Tensor]:
    """Key and step as signed integers, and the row numbers."""
    if noise is None:
        return 0, 0, unused_B
    row_B = noise.row_B.to(device=unused_B.device, dtype=torch.int64).contiguous()
    return _signed(noise.key, 64), _signed(noise.step, 32), row_B


def _signed(number: int, bits: int) -> int:
    wrapped = number & ((1 << bits) - 1)
    return wrapped - (wrapped >> (bits - 1) << bits)


@triton.jit
def _block_offsets(block, numel, FULL: tl.constexpr):
    """(offset [8, 128], which are values, which lanes are bytes, lanes) of a block."""
    plane = tl.arange(0, 8)[:, None]
    lane = tl.arange(0, 128)[None, :]
    first = block * 1024
    if FULL:
        every = tl.full((8, 128), 1, tl.int1)
        return first + plane * 128 + lane, every, tl.full((1, 128), 1, tl.int1), 128
    else:
        lanes = (numel - first + 7) // 8
        offset = first + plane * lanes + lane
        return offset, (lane < lanes) & (offset < numel), lane < lanes, lanes


@triton.jit
def _load_step(scale_ptr, offset, mask):
    step = tl.load(scale_ptr + offset, mask, other=0.0).to(tl.float32)
    return tl.where(step == step, step, float("nan"))  # the canonical NaN, as on CPUs


@triton.jit
def _round(value):
    """To the nearest integer, ties to even, for magnitudes up to 2^23."""
    shift = tl.where(value < 0, -8388608.0, 8388608.0)
    return ((value + shift) - shift).to(tl.int32)


@triton.jit
def _random(block, row, key, step):
    """Random numbers of a block, int32 [8, 128]: plane p is half p % 2 of word p // 2."""
    zero = tl.zeros((128,), tl.uint32)
    counter = (block * 128 + tl.arange(0, 128)).to(tl.uint32)
    low, high = zero + row.to(tl.uint32), zero + (row >> 32).to(tl.uint32)
    wide = key.to(tl.int64).to(tl.uint64, bitcast=True)  # Triton takes a small key as an int32
    w0, w1, w2, w3 = tl.philox(wide, counter, low, high, zero + step.to(tl.uint32), 10)
    plane = tl.arange(0, 8)[:, None]
    first = tl.where(plane < 2, w0[None, :], w1[None, :])
    second = tl.where(plane < 6, w2[None, :], w3[None, :])
    word = tl.where(plane < 4, first, second)
    return tl.where(plane % 2 == 0, word & 0xFFFF, word >> 16).to(tl.int32)


@triton.jit
def _pack_field(code, base, lanes, bytes_mask, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Store a field of `WIDTH` bits as `WIDTH` rows of bytes."""
    PARTS: tl.constexpr = 8 // WIDTH
    part = tl.arange(0, PARTS)[:, None, None]
    field = tl.reshape((code >> SHIFT) & ((1 << WIDTH) - 1), (PARTS, WIDTH, 128))
    packed = tl.sum(field << (part * WIDTH), axis=0)
    row = SHIFT + tl.arange(0, WIDTH)[:, None]
    place = base + row * lanes + tl.arange(0, 128)[None, :]
    tl.store(place, packed.to(tl.uint8), mask=tl.broadcast_to(bytes_mask, (WIDTH, 128)))


@triton.jit
def _unpack_field(base, lanes, bytes_mask, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    plane = tl.arange(0, 8)[:, None]
    row = SHIFT + plane % WIDTH
    place = base + row * lanes + tl.arange(0, 128)[None, :]
    packed = tl.load(place, mask=tl.broadcast_to(bytes_mask, (8, 128)), other=0).to(tl.int32)
    return ((packed >> (plane // WIDTH * WIDTH)) & ((1 << WIDTH) - 1)) << SHIFT


@triton.jit
def store_value(pointer, value, mask):
    """Store in the pointer's format; returns the bits, as fp32, of the magnitude stored.

    bf16 is rounded by hand: the interpreter truncates. NaN is not: a GPU's, 0x7FFFFFFF, would wrap.
    """
    word = value.to(tl.int32, bitcast=True)
    if pointer.dtype.element_ty == tl.bfloat16:
        short = tl.where(value == value, (word + 0x7FFF + ((word >> 16) & 1)) >> 16, 0x7FC0)
        tl.store(pointer, short.to(tl.int16).to(tl.bfloat16, bitcast=True), mask)
        word = short << 16
    else:
        stored = value.to(pointer.dtype.element_ty)
        tl.store(pointer, stored, mask)
        word = stored.to(tl.float32).to(tl.int32, bitcast=True)
    return word & _MAGNITUDE


@triton.jit
def _store_fresh(fresh_ptr, finite_ptr, row, place, value, mask):
    stored = store_value(fresh_ptr + place, value, mask)
    worst = tl.max(tl.max(tl.where(mask, stored, 0), axis=1), axis=0)
    tl.store(finite_ptr + row, 0, mask=worst >= _INFINITY)  # by any program: nobody writes but 0


@triton.jit(do_not_specialize=["first", "key", "step"])  # else 1 and multiples of 16 compile anew
def _encode_kernel(
    x_ptr,
    m_ptr,
    scale_ptr,
    payload_ptr,
    fresh_ptr,
    finite_ptr,
    row_ptr,
    first,
    numel,
    x_row,
    m_row,
    scale_row,
    payload_row,
    fresh_row,
    key,
    step,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    DELTA: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FULL: tl.constexpr,
):
    HALF: tl.constexpr = 1 << (BITS - 1)
    block, row = first + tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offset, mask, bytes_mask, lanes = _block_offsets(block, numel, FULL)
    place = (row * x_row + offset, row * m_row + offset)
    scale = _load_step(scale_ptr, row * scale_row + offset // GROUP, mask)
    usable = tl.abs(scale) > 0.0
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.div_rn(one, tl.where(usable, scale, 1.0))  # rounded once; `/` is an approximation
    scaled = tl.where(usable, difference(x_ptr, m_ptr, place, mask, DELTA) * inverse, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -1.0 * HALF), HALF - 1.0)  # before rounding, as on CPUs
    if STOCHASTIC:
        random = _random(block, tl.load(row_ptr + row), key, step)
        level = (_round(scaled * 65536.0) + random) >> 16
    else:
        level = _round(scaled)
    if DELTA:
        memory = tl.load(m_ptr + place[1], mask, other=0.0).to(tl.float32)
        value = memory + level.to(tl.float32) * scale
        _store_fresh(fresh_ptr, finite_ptr, row, row * fresh_row + offset, value, mask)
    code = tl.where(mask, level + HALF, 0)  # padding: equal bytes everywhere
    base = payload_ptr + row * payload_row + block * (128 * BITS)
    if BITS == 8:
        _pack_field(code, base, lanes, bytes_mask, 8, 0)
    if BITS & 4:
        _pack_field(code, base, lanes, bytes_mask, 4, 0)
    if BITS & 2:
        _pack_field(code, base, lanes, bytes_mask, 2, BITS & 4)
    if BITS & 1:
        _pack_field(code, base, lanes, bytes_mask, 1, BITS & 6)


@triton.jit(do_not_specialize=["first"])  # else 1 and multiples of 16 compile anew
def _decode_kernel(
    payload_ptr,
    scale_ptr,
    m_ptr,
    fresh_ptr,
    out_ptr,
    finite_ptr,
    first,
    numel,
    payload_row,
    scale_row,
    m_row,
    fresh_row,
    out_row,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    DELTA: tl.constexpr,
    FULL: tl.constexpr,
):
    block, row = first + tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offset, mask, bytes_mask, lanes = _block_offsets(block, numel, FULL)
    base = payload_ptr + row * payload_row + block * (128 * BITS)
    code = tl.zeros((8, 128), tl.int32)
    if BITS == 8:
        code = _unpack_field(base, lanes, bytes_mask, 8, 0)
    if BITS & 4:
        code = _unpack_field(base, lanes, bytes_mask, 4, 0)
    if BITS & 2:
        code |= _unpack_field(base, lanes, bytes_mask, 2, BITS & 4)
    if BITS & 1:
        code |= _unpack_field(base, lanes, bytes_mask, 1, BITS & 6)
    scale = _load_step(scale_ptr, row * scale_row + offset // GROUP, mask)
    value = (code - (1 << (BITS - 1))).to(tl.float32) * scale
    if DELTA:
        value = tl.load(m_ptr + row * m_row + offset, mask, other=0.0).to(tl.float32) + value
        _store_fresh(fresh_ptr, finite_ptr, row, row * fresh_row + offset, value, mask)
    store_value(out_ptr + row * out_row + offset, value, mask)
