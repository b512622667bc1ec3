"""Whole blocks as numba intrinsics: packing, random numbers, copies.

A block is 8 planes of 128 lanes; in the last block of a row planes have fewer lanes, and its codes
are spread to 128 before they are packed. See `vector_ir.py` for the vectors.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from thinpipe.pipeline.wire.kernels.cpu.llvm.vector_ir import (
    I8,
    I16,
    I64,
    Builder,
    Value,
    filled,
    pointer_to,
    splat,
    store,
    vector,
)

_PLANE = 128  # the layout in `kernels/__init__.py`
_WIDTHS = (8, 4, 2, 1)  # of a code's fields
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of Philox4x32 (Salmon et al., SC'11)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # its key schedule


def _fields(bits: int) -> list[tuple[int, int, int]]:
    """(width, shift, first row) of the fields of a code."""
    fields, shift = [], 0
    for width in _WIDTHS:
        if bits & width:
            fields.append((width, shift, shift))
            shift += width
    return fields


def _switch_bits(b: Builder, bits: Value, body: Callable[[int], None]) -> None:
    """One case per bit width, so that every shift is a constant."""
    done = b.append_basic_block("packed")
    chosen = b.switch(bits, done)
    for width in range(1, 9):
        block = b.append_basic_block(f"bits{width}")
        chosen.add_case(bits.type(width), block)
        b.position_at_end(block)
        body(width)
        b.branch(done)
    b.position_at_end(done)


def _byte_row(b: Builder, pointer: Value, row: int) -> Value:
    kind = ir.PointerType(vector(I8, _PLANE))
    return b.bitcast(b.gep(pointer, [I64(row * _PLANE)]), kind)


def _load_row(b: Builder, pointer: Value, row: int) -> Value:
    loaded = b.load(_byte_row(b, pointer, row), typ=vector(I8, _PLANE))
    loaded.align = 1  # messages have codes at any byte
    return loaded


def _store_row(b: Builder, value: Value, pointer: Value, row: int) -> None:
    b.store(value, _byte_row(b, pointer, row)).align = 1


def _shift(b: Builder, value: Value, left: int) -> Value:
    if left == 0:
        return value
    move = b.shl if left > 0 else b.lshr
    return move(value, filled(abs(left), I8, _PLANE))


@intrinsic
def pack_block(typing: Any, codes: Any, payload: Any, start: Any, bits: Any) -> Any:
    """Pack 8 planes of 128 codes into `bits` rows of 128 bytes of `payload`, from `start` on."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        source = pointer_to(context, b, (codes, args[0]), I64(0))
        target = pointer_to(context, b, (payload, args[1]), args[2])

        def body(width_all: int) -> None:
            planes = [_load_row(b, source, plane) for plane in range(8)]
            for width, shift, first in _fields(width_all):
                mask = filled((1 << width) - 1, I8, _PLANE)
                for row in range(width):
                    packed = None
                    for i, plane in enumerate(range(row, 8, width)):
                        field = b.and_(_shift(b, planes[plane], -shift), mask)
                        moved = _shift(b, field, i * width)
                        packed = moved if packed is None else b.or_(packed, moved)
                    _store_row(b, packed, target, first + row)

        _switch_bits(b, args[3], body)
        return context.get_dummy_value()

    return types.void(codes, payload, types.int64, types.int64), codegen


@intrinsic
def unpack_block(typing: Any, payload: Any, start: Any, codes: Any, bits: Any) -> Any:
    """The inverse of `pack_block`."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        source = pointer_to(context, b, (payload, args[0]), args[1])
        target = pointer_to(context, b, (codes, args[2]), I64(0))

        def body(width_all: int) -> None:
            planes: list[Value] = [None] * 8
            for width, shift, first in _fields(width_all):
                mask = filled((1 << width) - 1, I8, _PLANE)
                for row in range(width):
                    packed = _load_row(b, source, first + row)
                    for i, plane in enumerate(range(row, 8, width)):
                        field = _shift(b, b.and_(_shift(b, packed, -i * width), mask), shift)
                        known = planes[plane]
                        planes[plane] = field if known is None else b.or_(known, field)
            for plane, code in enumerate(planes):
                _store_row(b, code, target, plane)

        _switch_bits(b, args[3], body)
        return context.get_dummy_value()

    return types.void(payload, types.int64, codes, types.int64), codegen


@intrinsic
def copy_planes(
    typing: Any, source: Any, source_at: Any, target: Any, target_at: Any, shape: Any
) -> Any:
    """Copy `shape` = (rows, bytes) between byte arrays; each `at` is (start, distance of rows).

    As a numba loop this is vectorized with gathers and takes longer to compile than all the rest.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        source_start, source_row = cgutils.unpack_tuple(b, args[1])
        target_start, target_row = cgutils.unpack_tuple(b, args[3])
        rows, nbytes = cgutils.unpack_tuple(b, args[4])
        with cgutils.for_range(b, rows) as loop:
            from_at = b.add(source_start, b.mul(loop.index, source_row))
            to_at = b.add(target_start, b.mul(loop.index, target_row))
            from_pointer = pointer_to(context, b, (source, args[0]), from_at)
            to_pointer = pointer_to(context, b, (target, args[2]), to_at)
            cgutils.raw_memcpy(b, to_pointer, from_pointer, nbytes, 1)  # rows never overlap
        return context.get_dummy_value()

    return types.void(source, source_at, target, target_at, shape), codegen


@intrinsic
def fill_codes(typing: Any, codes: Any, start: Any, end: Any, code: Any) -> Any:
    """Write one code to a range."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        pointer = pointer_to(context, b, (codes, args[0]), args[1])
        cgutils.memset(b, pointer, b.sub(args[2], args[1]), b.trunc(args[3], I8))
        return context.get_dummy_value()

    return types.void(codes, types.int64, types.int64, types.int64), codegen


@intrinsic
def philox_block(typing: Any, noise: Any, lanes: Any, counter: Any, at: Any) -> Any:
    """Fill `noise` (uint16, 8 planes of `lanes`) for a block; `at` = (key, row number, step).

    Nothing happens if `noise` is None. Up to 16 numbers past the end may be overwritten. Words
    live in the low halves of 64-bit lanes: a round is then two multiplications, two shifts and
    two three-way xors, and what a multiplication leaves in the upper halves is never looked at.
    """
    chunk = 16
    kind = vector(I64, chunk)

    def rounds(b: Builder, words: list[Value], key_0: Value, key_1: Value) -> list[Value]:
        c0, c1, c2, c3 = words
        low_half, half = filled(0xFFFFFFFF, I64, chunk), filled(32, I64, chunk)
        for _ in range(10):
            p0 = b.mul(b.and_(c0, low_half), filled(_MULTIPLIERS[0], I64, chunk))
            p1 = b.mul(b.and_(c2, low_half), filled(_MULTIPLIERS[1], I64, chunk))
            c0 = b.xor(b.xor(b.lshr(p1, half), c1), splat(b, key_0, chunk))
            c2 = b.xor(b.xor(b.lshr(p0, half), c3), splat(b, key_1, chunk))
            c1, c3 = p1, p0
            key_0, key_1 = b.add(key_0, I64(_WEYL[0])), b.add(key_1, I64(_WEYL[1]))
        return [c0, c1, c2, c3]

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        if isinstance(noise, types.NoneType):
            return context.get_dummy_value()
        target = pointer_to(context, b, (noise, args[0]), I64(0))
        key, row, step = cgutils.unpack_tuple(b, args[3])
        lane = ir.Constant(kind, list(range(chunk)))
        chunks = b.lshr(b.add(args[1], I64(chunk - 1)), I64(4))
        with cgutils.for_range(b, chunks) as loop:
            # Last chunk first: what it writes past its plane is overwritten by the next plane.
            first = b.mul(b.sub(b.sub(chunks, I64(1)), loop.index), I64(chunk))
            words = [
                b.add(splat(b, b.add(args[2], first), chunk), lane),
                splat(b, row, chunk),
                splat(b, b.lshr(row, I64(32)), chunk),
                splat(b, step, chunk),
            ]
            mixed = rounds(b, words, key, b.lshr(key, I64(32)))
            for plane in range(8):
                half = b.lshr(mixed[plane // 2], filled(plane % 2 * 16, I64, chunk))
                place = b.gep(target, [b.add(first, b.mul(args[1], I64(plane)))])
                store(b, b.trunc(half, vector(I16, chunk)), place)
        return context.get_dummy_value()

    return types.void(noise, types.int64, types.int64, at), codegen
