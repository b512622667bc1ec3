"""Exact top-k by magnitude on CPUs.

A sample of the values gives a lower bound that a few more than k pass; one vector pass keeps those,
a radix selection finds the k-th largest among them, and a second pass writes the bit mask and the
chosen values. Magnitudes are compared as integers: fp32 bit patterns without their sign order
alike, with NaN above all. Of equal magnitudes the first ones are taken.

A mask holds value e in bit e % 8 of byte e // 8. Axes: n values, M = ceil(n / 8) mask bytes, k
chosen values.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled
from thinpipe.pipeline.wire.kernels.cpu.llvm.vector_ir import (
    I16,
    I32,
    Builder,
    Value,
    call,
    counted,
    filled,
    splat,
    vector,
)

_LANES = 16  # flags of two bytes of a mask; words of an AVX-512 register
_SAMPLE, _STRIDE = 64, 64  # 64 neighbours are looked at, 63 times as many are skipped
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_WORDS = vector(I32, _LANES)


def select_top(x_n: Tensor, mask_M: Tensor, kept_k: Tensor, room_n: Tensor | None = None) -> None:
    """Mark and copy the k values of largest magnitude, in their order; fp32, contiguous.

    `room_n` is overwritten; it saves the allocation of as much memory as `x_n` takes.
    """
    mask_M.zero_()
    if kept_k.numel():
        room_n = torch.empty_like(x_n) if room_n is None else room_n
        _select(_words(x_n), mask_M.numpy(), _words(kept_k), _words(room_n))


def _words(x_n: Tensor) -> Any:
    return x_n.detach().numpy().view(np.uint32)


def _chunk(b: Builder, x: Value, bound: Value) -> tuple[Value, Value]:
    """16 words at an address, and which of them have at least the bound's magnitude."""
    words = b.load(b.inttoptr(x, ir.PointerType(_WORDS)), typ=_WORDS)
    words.align = 4  # of a float: rows start anywhere
    magnitude = b.and_(words, filled(0x7FFFFFFF, I32, _LANES))
    return words, b.icmp_unsigned(">=", magnitude, splat(b, bound, _LANES))


@intrinsic
def _keep_large(typing: Any, x: Any, bound: Any, out: Any, mask: Any) -> Any:
    """Store those of 16 words that reach the bound end to end, and two bytes of a mask if given.

    Returns how many they are. Addresses are in bytes.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        words, chosen = _chunk(b, args[0], args[1])
        flags = b.bitcast(chosen, I16)
        if not isinstance(mask, types.NoneType):
            b.store(flags, b.inttoptr(args[3], ir.PointerType(I16))).align = 1
        pointer = b.inttoptr(args[2], ir.PointerType(I32))
        name = f"llvm.masked.compressstore.v{_LANES}i32"
        call(b, name, ir.VoidType(), [words, pointer, chosen])
        return counted(b, flags)

    mask_at = mask if isinstance(mask, types.NoneType) else types.uintp
    return types.int64(types.uintp, types.uint32, types.uintp, mask_at), codegen


@intrinsic
def _count_equal(typing: Any, x: Any, bound: Any) -> Any:
    """How many of 16 words have the bound's magnitude."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        _, reaching = _chunk(b, args[0], args[1])
        _, above = _chunk(b, args[0], b.add(args[1], I32(1)))
        return counted(b, b.bitcast(b.xor(reaching, above), I16))

    return types.int64(types.uintp, types.uint32), codegen


@njit
def _sampled_bound(x: Any, k: Any) -> Any:
    """A magnitude that, going by a sample, a few more than k words reach."""
    counts, seen = np.zeros(2048, np.int64), 0
    for start in range(0, x.size - _SAMPLE, _SAMPLE * _STRIDE):
        for i in range(start, start + _SAMPLE):
            counts[(x[i] & _MAGNITUDE) >> np.uint32(20)] += 1
        seen += _SAMPLE
    wanted = k * (seen / x.size)
    wanted += 4 * np.sqrt(wanted) + 4  # four standard deviations: hardly ever too few
    above = 0
    for high in range(2047, -1, -1):
        if above + counts[high] >= wanted:
            part = 1.0 - (wanted - above) / counts[high]
            # as if the bin's words lay evenly in it
            return np.uint32((high << 20) + int(part * ((1 << 20) - 1)))
        above += counts[high]
    return np.uint32(0)


@njit
def _candidates(x: Any, bound: Any, found: Any) -> Any:
    """Words that reach the bound, in order; returns their number."""
    count, full = 0, x.size // _LANES * _LANES
    source, target = x.ctypes.data, found.ctypes.data
    for i in range(0, full, _LANES):
        count += _keep_large(np.uintp(source + 4 * i), bound, np.uintp(target + 4 * count), None)
    for i in range(full, x.size):
        if x[i] & _MAGNITUDE >= bound:
            found[count] = x[i]
            count += 1
    return count


@njit
def _kth_largest(words: Any, count: Any, k: Any) -> Any:
    """The k-th largest magnitude of words[:count], which is reordered, and how often it counts.

    Radix selection by 11, 10 and 10 bits; what is left after a digit moves to the front.
    """
    value, counts = np.uint32(0), np.empty(2048, np.int64)
    for shift, mask in ((20, 2047), (10, 1023), (0, 1023)):
        counts[:] = 0
        for i in range(count):
            counts[((words[i] & _MAGNITUDE) >> np.uint32(shift)) & np.uint32(mask)] += 1
        digit = mask
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        left = 0
        for i in range(count):
            word = words[i]
            words[left] = word  # always, and counted if it stays: no branch
            left += ((word & _MAGNITUDE) >> np.uint32(shift)) & np.uint32(mask) == digit
        count = left
        value |= np.uint32(digit << shift)
    return value, k, count


@njit
def _last_tie(x: Any, bound: Any, ties: Any) -> Any:
    """Where the 16 words start of which one is the last tie that is taken, and ties before them."""
    seen, full = 0, x.size // _LANES * _LANES
    for i in range(0, full, _LANES):
        equal = _count_equal(np.uintp(x.ctypes.data + 4 * i), bound)
        if seen + equal >= ties:
            return i, seen
        seen += equal
    return full, seen


@njit
def _mark_chunks(x: Any, bound: Any, mask: Any, kept: Any, span: Any, count: Any) -> Any:
    """Words that reach the bound in a span of whole chunks; returns how many are kept by then."""
    source, target, flags = x.ctypes.data, kept.ctypes.data, mask.ctypes.data
    for i in range(span[0], span[1], _LANES):
        at = np.uintp(target + 4 * count)
        count += _keep_large(np.uintp(source + 4 * i), bound, at, np.uintp(flags + i // 8))
    return count


@njit
def _mark_each(x: Any, bound: Any, mask: Any, kept: Any, span: Any, state: Any) -> Any:
    """One by one: words above the bound, and the first `ties` that equal it."""
    count, ties = state
    for i in range(span[0], span[1]):
        magnitude = x[i] & _MAGNITUDE
        chosen = magnitude > bound
        if magnitude == bound and ties > 0:
            chosen = True
            ties -= 1
        if chosen:
            mask[i // 8] |= np.uint8(1 << (i % 8))
            kept[count] = x[i]
            count += 1
    return count, ties


@compiled
def _select(x: Any, mask: Any, kept: Any, found: Any) -> Any:
    """Chunks reach the bound up to the last tie that is taken, and pass it from there on."""
    k = kept.size
    bound = _sampled_bound(x, k)
    count = _candidates(x, bound, found)
    if count < k:
        count = _candidates(x, np.uint32(0), found)  # the sample misled: take all
    bound, ties, equal = _kth_largest(found, count, k)
    full = x.size // _LANES * _LANES
    cut, before = (full, 0) if ties == equal else _last_tie(x, bound, ties)  # mostly all ties count
    after = min(cut + _LANES, full)
    count = _mark_chunks(x, bound, mask, kept, (0, cut), 0)
    count, ties = _mark_each(x, bound, mask, kept, (cut, after), (count, ties - before))
    count = _mark_chunks(x, bound + np.uint32(1), mask, kept, (after, full), count)
    _mark_each(x, bound, mask, kept, (full, x.size), (count, ties))
