"""Whole numbers as symbols to entropy-code; `cpu/coefficients.py` has the kernels.

A coefficient q of shift h has the symbol (q >> h) + 16, clamped to 0 ... 31, and its h low bits, in
digits of at most 5 bits, lowest first. A list of symbols holds those of all coefficients, row after
row, then the lowest digits of all that have any, then the second ones. Where the symbol is 0 or 31
the number itself goes next to the list, in 32 bits, and its digits are 0.

Tokens choose their shifts, and the frequency tables that symbols are coded with, among T rows of
them. A digit of w bits is coded with table `digit_table` + w.
"""

from typing import NamedTuple

from torch import Tensor

SYMBOLS = 32  # the most that rANS takes (coding/rans.py)
MIDDLE = 16
"""The symbol of 0."""
DIGIT_BITS = 5  # so that a digit is a symbol, too


class Layout(NamedTuple):
    """Shifts and tables of K dimensions, for T kinds of tokens."""

    shift_TK: Tensor  # uint8
    table_TK: Tensor  # uint8
    digit_table: int

    def symbols(self, kind_N: Tensor) -> int:
        """How many symbols coefficients of such tokens have, digits included."""
        digits_T = ((self.shift_TK + (DIGIT_BITS - 1)) // DIGIT_BITS + 1).sum(1)
        return int(digits_T[kind_N].sum())
