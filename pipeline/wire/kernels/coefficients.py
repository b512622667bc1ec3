"""Whole numbers as symbols to entropy-code: the CoefficientKernels contract.

A coefficient q of shift h has the symbol (q >> h) + 16, clamped to 0 ... 31, and its h low bits, in
digits of at most 5 bits, lowest first. A list of symbols holds those of all coefficients, row after
row, then the lowest digits of all that have any, then the second ones. Where the symbol is 0 or 31
the number itself goes next to the list, in 32 bits, and its digits are 0.

Tokens choose their shifts, and the frequency tables that symbols are coded with, among T rows of
them. A digit of w bits is coded with table `digit_table` + w.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

SYMBOLS = 32
MIDDLE = 16
"""The symbol of 0."""
DIGIT_BITS = 5


class Layout(NamedTuple):
    """Shifts and tables of K dimensions, for T kinds of tokens."""

    shift_TK: Tensor  # uint8
    table_TK: Tensor  # uint8
    digit_table: int

    def symbols(self, kind_N: Tensor) -> int:
        """How many symbols coefficients of such tokens have, digits included."""
        digits_T = ((self.shift_TK + (DIGIT_BITS - 1)) // DIGIT_BITS + 1).sum(1)
        return int(digits_T[kind_N].sum())


class CoefficientKernels(Protocol):
    """Functions every backend offers, equal bit for bit. All tensors are contiguous, on the CPU.

    Axes: N tokens, K dimensions, S symbols with digits, E numbers next to them. `kind_N` (int64) is
    below T. Outputs are preallocated and fully written.
    """

    def split(
        self, q_NK: Tensor, kind_N: Tensor, layout: Layout, symbol_S: Tensor, outside_E: Tensor
    ) -> int:
        """Write symbols (uint8), and to the start of `outside_E` (int32) numbers; returns how many.

        `q_NK` is int32; `outside_E` has room for all.
        """

    def tables(self, kind_N: Tensor, layout: Layout, table_S: Tensor) -> None:
        """Write the table (uint8) of each symbol."""

    def join(
        self, symbol_S: Tensor, outside_E: Tensor, kind_N: Tensor, layout: Layout, q_NK: Tensor
    ) -> bool:
        """Write the coefficients; False if there are not as many outside numbers as symbols say."""
