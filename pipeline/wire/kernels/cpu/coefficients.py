"""The coefficient kernels on CPUs, compiled by numba: no GIL, and a pass for what all have.

Digits and numbers outside are looked for only in rows that have any. All tensors are contiguous, on
the CPU; outputs are preallocated and fully written.

Axes: N tokens, K dimensions, S symbols with digits, E numbers next to them. `kind_N` (int64) is
below T.
"""

from typing import Any

import numpy as np
from numba import njit
from torch import Tensor

from thinpipe.pipeline.wire.kernels.coefficients import DIGIT_BITS, MIDDLE, SYMBOLS, Layout
from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled

_MIDDLE, _LAST = np.int32(MIDDLE), np.int32(SYMBOLS - 1)
_RUN = 256
"""Symbols that are looked at together for such as are outside."""


def split(q_NK: Tensor, kind_N: Tensor, layout: Layout, symbol_S: Tensor, outside_E: Tensor) -> int:
    """Write symbols (uint8), and to the start of `outside_E` (int32) numbers; returns how many.

    `q_NK` is int32; `outside_E` has room for all.
    """
    shift, kind = layout.shift_TK.numpy(), kind_N.numpy()
    symbol, outside = symbol_S.numpy(), outside_E.numpy()
    return int(_split(q_NK.numpy(), kind, shift, shift.max(1), symbol, outside))


def tables(kind_N: Tensor, layout: Layout, table_S: Tensor) -> None:
    """Write the table (uint8) of each symbol."""
    shift, table = layout.shift_TK.numpy(), layout.table_TK.numpy()
    _tables(kind_N.numpy(), shift, shift.max(1), table, layout.digit_table, table_S.numpy())


def join(symbol_S: Tensor, outside_E: Tensor, kind_N: Tensor, layout: Layout, q_NK: Tensor) -> bool:
    """Write the coefficients; False if there are not as many outside numbers as symbols say."""
    shift, kind = layout.shift_TK.numpy(), kind_N.numpy()
    symbol, outside = symbol_S.numpy(), outside_E.numpy()
    return bool(_join(symbol, outside, kind, shift, shift.max(1), q_NK.numpy()))


@compiled
def _split(q: Any, kind: Any, shift: Any, deepest: Any, symbol: Any, outside: Any) -> Any:
    dimensions, used = q.shape[1], 0
    for n in range(kind.size):
        symbols = symbol[n * dimensions : (n + 1) * dimensions]
        if _symbols_of(q[n], shift[kind[n]], symbols):
            for k in range(dimensions):
                if _is_outside(symbols[k]):
                    outside[used] = q[n, k]
                    used += 1
    at = q.size
    for lower in range(0, deepest.max(), DIGIT_BITS):
        for n in range(kind.size):
            if deepest[kind[n]] > lower:
                symbols = symbol[n * dimensions : (n + 1) * dimensions]
                at = _split_digits(q[n], shift[kind[n]], lower, symbols, symbol, at)
    return used


@njit
def _symbols_of(q: Any, shift: Any, symbol: Any) -> Any:
    """Write a row's symbols; how many are outside."""
    found = 0
    for k in range(q.size):
        s = min(max((q[k] >> np.int32(shift[k])) + _MIDDLE, np.int32(0)), _LAST)
        symbol[k] = s
        found += (s == 0) | (s == _LAST)  # `or` would be a branch, and the loop no vectors
    return found


@njit
def _is_outside(symbol: Any) -> Any:
    """Whether it stands for all that is at least as large."""
    return symbol == 0 or symbol == _LAST


@njit
def _split_digits(q: Any, shift: Any, lower: Any, symbols: Any, out: Any, at: Any) -> Any:
    """Write a row's digits that begin with bit `lower`; where they end."""
    for k in range(q.size):
        width = min(np.int64(shift[k]) - lower, DIGIT_BITS)
        if width > 0:
            digit = (q[k] >> lower) & ((1 << width) - 1)
            out[at] = 0 if _is_outside(symbols[k]) else digit
            at += 1
    return at


@compiled
def _tables(kind: Any, shift: Any, deepest: Any, table: Any, digit_table: Any, out: Any) -> Any:
    dimensions = shift.shape[1]
    for n in range(kind.size):
        row, chosen = out[n * dimensions : (n + 1) * dimensions], table[kind[n]]
        for k in range(dimensions):
            row[k] = chosen[k]
    at = kind.size * dimensions
    for lower in range(0, deepest.max(), DIGIT_BITS):
        for n in range(kind.size):
            if deepest[kind[n]] > lower:
                at = _digit_tables(shift[kind[n]], lower, digit_table, out, at)


@njit
def _digit_tables(shift: Any, lower: Any, digit_table: Any, out: Any, at: Any) -> Any:
    """Write the tables of a row's digits that begin with bit `lower`; where they end."""
    for k in range(shift.size):
        width = min(np.int64(shift[k]) - lower, DIGIT_BITS)
        if width > 0:
            out[at] = digit_table + width
            at += 1
    return at


@compiled
def _join(symbol: Any, outside: Any, kind: Any, shift: Any, deepest: Any, q: Any) -> Any:
    dimensions = q.shape[1]
    for n in range(kind.size):
        symbols, row, shifts = symbol[n * dimensions : (n + 1) * dimensions], q[n], shift[kind[n]]
        for k in range(dimensions):
            row[k] = (np.int32(symbols[k]) - _MIDDLE) << np.int32(shifts[k])
    at = q.size
    for lower in range(0, deepest.max(), DIGIT_BITS):
        for n in range(kind.size):
            if deepest[kind[n]] > lower:
                at = _join_digits(q[n], shift[kind[n]], lower, symbol, at)
    return _join_outside(symbol[: q.size], outside, q.reshape(-1))


@njit
def _join_digits(q: Any, shift: Any, lower: Any, symbol: Any, at: Any) -> Any:
    """Add a row's digits that begin with bit `lower`; where they end."""
    for k in range(q.size):
        if np.int32(shift[k]) > lower:
            q[k] += np.int32(symbol[at]) << np.int32(lower)
            at += 1
    return at


@njit
def _join_outside(symbol: Any, outside: Any, q: Any) -> Any:
    """Write the numbers outside; False if there are more or fewer than symbols say."""
    used = 0
    for start in range(0, q.size, _RUN):
        found = 0
        for i in range(start, min(start + _RUN, q.size)):
            found += (symbol[i] == 0) | (symbol[i] == _LAST)
        if used + found > outside.size:  # a damaged message must not read past it
            return False
        if found:
            for i in range(start, min(start + _RUN, q.size)):
                if _is_outside(symbol[i]):
                    q[i] = outside[used]
                    used += 1
    return used == outside.size
