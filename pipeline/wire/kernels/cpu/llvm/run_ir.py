"""Runs of neighbouring values as numba intrinsics, and kept values between their zeros.

See `vector_ir.py` for the vectors and for which element type stands for which format.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from thinpipe.pipeline.wire.kernels.cpu.llvm.vector_ir import (
    I16,
    I64,
    Builder,
    Operand,
    Value,
    call,
    counted,
    from_float,
    operands,
    quiet,
    steps,
    store,
    vector,
)

CHUNK = 16  # flags of two bytes of a mask; fp32 values of an AVX-512 register
_F32 = ir.FloatType()
_FLAGS = ir.VectorType(ir.IntType(1), CHUNK)


def _over_run(body: Callable[..., None]) -> Callable[..., Value]:
    """Code for body(b, operands, index, mask) at every 64 lanes.

    The last argument is the starts of the others, which are operands, then the count.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        *starts, count = cgutils.unpack_tuple(b, args[-1])
        found = operands(context, b, signature.args, args, starts)
        steps(b, count, lambda index, mask: body(b, found, index, mask))
        return context.get_dummy_value()

    return codegen


def _write(b: Builder, value: Value, target: Operand, index: Value, mask: Value) -> None:
    store(b, from_float(b, quiet(b, value), target.element), target.at(index), mask)


@intrinsic
def take_run(typing: Any, x: Any, base: Any, out: Any, at: Any) -> Any:
    """out := x - base, or x if base is None; `at` = (x start, base start, out start, count)."""

    def body(b: Builder, found: list[Operand], index: Value, mask: Value) -> None:
        x_op, base_op, out_op = found
        value = x_op.values(index, mask)
        if base_op:
            value = b.fsub(value, base_op.values(index, mask))
        store(b, value, out_op.at(index), mask)

    return types.void(x, base, out, at), _over_run(body)


@intrinsic
def put_run(typing: Any, value: Any, out: Any, at: Any) -> Any:
    """out := value, in the format of out; `at` = (value start, out start, count)."""

    def body(b: Builder, found: list[Operand], index: Value, mask: Value) -> None:
        value_op, out_op = found
        _write(b, value_op.values(index, mask), out_op, index, mask)

    return types.void(value, out, at), _over_run(body)


@intrinsic
def update_run(typing: Any, sent: Any, mean: Any, x: Any, base: Any, at: Any) -> Any:
    """left = (x - base) - sent; base += mean; x := base + left; `at` = four starts, count."""

    def body(b: Builder, found: list[Operand], index: Value, mask: Value) -> None:
        sent_op, mean_op, x_op, base_op = found
        before = base_op.values(index, mask)
        change = b.fsub(x_op.values(index, mask), before)
        left = b.fsub(change, sent_op.values(index, mask))
        _write(b, b.fadd(before, mean_op.values(index, mask)), base_op, index, mask)
        # read again: what is left stands on the base as it was rounded
        _write(b, b.fadd(base_op.values(index, mask), left), x_op, index, mask)

    return types.void(sent, mean, x, base, at), _over_run(body)


@intrinsic
def expand_chunk(typing: Any, mask: Any, kept: Any, known: Any, out: Any, at: Any) -> Any:
    """out := kept values where the mask's next 16 flags are set; elsewhere zero.

    With `known` (`out` itself) values are added to it, and what is not flagged stays. `at` = (mask
    byte, kept start, out start). Returns how many kept values were used.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        mask_at, kept_at, out_at = cgutils.unpack_tuple(b, args[4])
        starts = [mask_at, kept_at, out_at, out_at]
        mask_op, kept_op, known_op, out_op = operands(context, b, signature.args, args, starts)
        word = b.load(b.bitcast(mask_op.at(I64(0)), ir.PointerType(I16)), typ=I16)
        word.align = 1
        flags, kind = b.bitcast(word, _FLAGS), vector(_F32, CHUNK)
        name, zeros = f"llvm.masked.expandload.v{CHUNK}f32", ir.Constant(kind, [0.0] * CHUNK)
        values = call(b, name, kind, [kept_op.at(I64(0)), flags, zeros])  # zero where not flagged
        target = b.bitcast(out_op.at(I64(0)), ir.PointerType(kind))
        if known_op:
            before = b.load(target, typ=kind)
            before.align = 4
            values = b.select(flags, b.fadd(before, values), before)
        b.store(values, target).align = 4
        return counted(b, word)

    return types.int64(mask, kept, known, out, at), codegen
