"""Tiles of 64 values as numba intrinsics: rotation, and adding to a memory.

See `vector_ir.py` for the vectors and for which element type stands for which format, and
`kernels/hadamard.py` for the rotation.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from thinpipe.pipeline.wire.kernels.cpu.llvm.vector_ir import (
    I32,
    I64,
    LANES,
    Builder,
    Kept,
    Value,
    deliver,
    filled,
    operands,
    steps,
    store,
    vector,
)

_SIDE = 8  # as in `kernels/hadamard.py`
_F32 = ir.FloatType()
_SIGN = 0x80000000  # of an fp32: to flip it rounds nothing


def _butterfly(b: Builder, tile: Value, distance: int) -> Value:
    """Sums and differences of values so far apart: a + b, and a + (-b), which rounds alike."""
    lanes, words = range(LANES), vector(I32, LANES)
    lower, upper = (
        b.shuffle_vector(tile, ir.Constant(tile.type, ir.Undefined), ir.Constant(words, places))
        for places in ([i & ~distance for i in lanes], [i | distance for i in lanes])
    )
    signs = ir.Constant(words, [_SIGN if i & distance else 0 for i in lanes])
    signed = b.bitcast(b.xor(b.bitcast(upper, words), signs), tile.type)  # one add for all lanes
    return b.fadd(lower, signed)


@intrinsic
def turn_tile(typing: Any, source: Any, target: Any, at: Any) -> Any:
    """Rotate the 64 fp32 values of a tile; `at` = (source start, target start)."""

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        starts = cgutils.unpack_tuple(b, args[2])
        source_op, target_op = operands(context, b, signature.args, args, starts)
        tile = source_op.load(I64(0))
        for distance in (8, 16, 32, 1, 2, 4):  # the last three are 8, 16, 32 once transposed
            tile = _butterfly(b, tile, distance)
        across = [i % _SIDE * _SIDE + i // _SIDE for i in range(LANES)]
        places = ir.Constant(vector(I32, LANES), across)
        tile = b.shuffle_vector(tile, ir.Constant(tile.type, ir.Undefined), places)
        store(b, b.fmul(tile, filled(1.0 / _SIDE, _F32)), target_op.at(I64(0)))
        return context.get_dummy_value()

    return types.void(source, target, at), codegen


@intrinsic
def add_run(
    typing: Any, value: Any, memory: Any, fresh: Any, out: Any, largest: Any, at: Any
) -> Any:
    """Write memory + value to `fresh` and `out`, or value itself without a memory.

    `at` = (value start, memory start, fresh start, out start, count); `largest` is that of
    `quantize_group`.
    """

    def codegen(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        *starts, count = cgutils.unpack_tuple(b, args[5])
        found = operands(context, b, signature.args, args, [*starts, I64(0)])
        value_op, m_op, fresh_op, out_op, seen_op = found
        kept = Kept(b, fresh_op, seen_op)

        def body(index: Value, mask: Value) -> None:
            deliver(b, (index, mask), value_op.values(index, mask), m_op, out_op, kept)

        steps(b, count, body)
        kept.close()
        return context.get_dummy_value()

    return types.void(value, memory, fresh, out, largest, at), codegen
