"""What the coefficient kernels mean, in plain torch; the symbols are described in
`../coefficients.py`.

Axes: N tokens, K dimensions, T kinds of tokens, S symbols with digits, E numbers next to them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinpipe.pipeline.wire.kernels.coefficients import DIGIT_BITS, MIDDLE, SYMBOLS, Layout

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from thinpipe.pipeline.wire.kernels.coefficients import CoefficientKernels
    from thinpipe.pipeline.wire.kernels.reference import coefficients as coefficients_reference


def split(q_NK: Tensor, kind_N: Tensor, layout: Layout, symbol_S: Tensor, outside_E: Tensor) -> int:
    """Write symbols and the numbers outside; see `CoefficientKernels.split`."""
    shift_NK = layout.shift_TK[kind_N].int()
    symbol_NK = ((q_NK >> shift_NK) + MIDDLE).clamp_(0, SYMBOLS - 1)
    outside_NK = _outside(symbol_NK)
    q_n = torch.where(outside_NK, 0, q_NK).flatten()
    parts = [symbol_NK.flatten()]
    for lower, index_n, width_n in _digits(shift_NK):
        parts.append((q_n[index_n] >> lower) & ((1 << width_n) - 1))
    symbol_S.copy_(torch.cat(parts))
    numbers_E = q_NK[outside_NK]
    outside_E[: len(numbers_E)] = numbers_E
    return len(numbers_E)


def tables(kind_N: Tensor, layout: Layout, table_S: Tensor) -> None:
    """Write the table of each symbol; see `CoefficientKernels.tables`."""
    more = [layout.digit_table + width_n for _, _, width_n in _digits(layout.shift_TK[kind_N])]
    table_S.copy_(torch.cat([layout.table_TK[kind_N].flatten(), *more]))


def join(symbol_S: Tensor, outside_E: Tensor, kind_N: Tensor, layout: Layout, q_NK: Tensor) -> bool:
    """Write the coefficients; see `CoefficientKernels.join`."""
    shift_NK = layout.shift_TK[kind_N].int()
    symbol_NK = symbol_S[: q_NK.numel()].view(q_NK.shape).int()
    q_n = ((symbol_NK - MIDDLE) << shift_NK).flatten()
    at = q_n.numel()
    for lower, index_n, _ in _digits(shift_NK):
        q_n[index_n] += symbol_S[at : at + len(index_n)].int() << lower
        at += len(index_n)
    outside_NK = _outside(symbol_NK)
    if int(outside_NK.sum()) != len(outside_E):
        return False
    q_NK.copy_(q_n.view(q_NK.shape))
    q_NK[outside_NK] = outside_E.int()
    return True


def _outside(symbol_NK: Tensor) -> Tensor:
    """Where the symbol stands for all that is at least as large."""
    return (symbol_NK == 0) | (symbol_NK == SYMBOLS - 1)


def _digits(shift_NK: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Lowest digits first: the bit each begins with, which coefficients have it, of what width."""
    shift_n = shift_NK.flatten().int()
    for lower in range(0, int(shift_n.max()) if len(shift_n) else 0, DIGIT_BITS):
        index_n = torch.nonzero(shift_n > lower).flatten()
        yield lower, index_n, (shift_n[index_n] - lower).clamp_max(DIGIT_BITS)


if TYPE_CHECKING:
    _checked: CoefficientKernels = coefficients_reference
