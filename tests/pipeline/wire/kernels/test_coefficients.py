"""Coefficients as symbols: the compiled kernels do what the reference does, and both invert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinpipe.pipeline.wire.kernels import Backend, load
from thinpipe.pipeline.wire.kernels.coefficients import (
    SYMBOLS,
    CoefficientKernels,
    Layout,
)

REFERENCE, NUMBA = (load("coefficients", name) for name in ("reference", "numba"))
DIGIT_TABLE = 29


@st.composite
def messages(draw: st.DrawFn) -> tuple[Tensor, Tensor, Layout]:
    """Numbers of any size, tokens of three kinds, and shifts that may be right for them or not."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens, dimensions = draw(st.integers(0, 20)), draw(st.integers(1, 40))
    deepest = draw(st.integers(0, 12))
    size_1K = 2 ** torch.empty(1, dimensions).uniform_(0, 15, generator=generator)
    unit_NK = torch.empty(tokens, dimensions).uniform_(-1, 1, generator=generator)
    shift_TK = torch.randint(deepest + 1, (3, dimensions), generator=generator)
    table_TK = torch.randint(30, (3, dimensions), generator=generator)
    kind_N = torch.randint(3, (tokens,), generator=generator)
    layout = Layout(shift_TK.to(torch.uint8), table_TK.to(torch.uint8), DIGIT_TABLE)
    return (size_1K * unit_NK).int(), kind_N, layout


def split(
    kernels: CoefficientKernels, q_NK: Tensor, kind_N: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols, their tables, and the numbers next to them."""
    symbol_S = torch.full((layout.symbols(kind_N),), 0xEE, dtype=torch.uint8)
    table_S = symbol_S.clone()
    outside_E = torch.full((q_NK.numel(),), -1, dtype=torch.int32)
    count = kernels.split(q_NK, kind_N, layout, symbol_S, outside_E)
    kernels.tables(kind_N, layout, table_S)
    return symbol_S, table_S, outside_E[:count]


def join(
    kernels: CoefficientKernels, symbol_S: Tensor, outside_E: Tensor, kind_N: Tensor, layout: Layout
) -> Tensor | None:
    q_NK = torch.full((len(kind_N), layout.shift_TK.shape[1]), -1, dtype=torch.int32)
    return q_NK if kernels.join(symbol_S, outside_E, kind_N, layout, q_NK) else None


@settings(max_examples=200, deadline=None)
@given(messages())
def test_backends_agree_and_numbers_come_back(message: tuple[Tensor, Tensor, Layout]) -> None:
    q_NK, kind_N, layout = message
    expected, found = (split(kernels, *message) for kernels in (REFERENCE, NUMBA))
    for theirs, ours in zip(expected, found, strict=True):
        assert torch.equal(theirs, ours)
    symbol_S, table_S, outside_E = found
    assert int(symbol_S.max() if len(symbol_S) else 0) < SYMBOLS
    digits = table_S[q_NK.numel() :].long() - DIGIT_TABLE
    assert bool(((digits >= 1) & (digits <= 5)).all())
    for kernels in (REFERENCE, NUMBA):
        again_NK = join(kernels, symbol_S, outside_E, kind_N, layout)
        assert again_NK is not None
        assert torch.equal(again_NK, q_NK)


@settings(max_examples=200, deadline=None)
@given(messages(), st.integers(0, 2**31), st.integers(-2, 2))
def test_backends_agree_on_symbols_that_nobody_wrote(
    message: tuple[Tensor, Tensor, Layout], seed: int, more: int
) -> None:
    """As damaged bytes give: any symbols, and too few or too many numbers next to them."""
    q_NK, kind_N, layout = message
    generator = torch.Generator().manual_seed(seed)
    count = layout.symbols(kind_N)
    symbol_S = torch.randint(SYMBOLS, (count,), generator=generator).to(torch.uint8)
    own_S = symbol_S[: q_NK.numel()]
    outside = int(((own_S == 0) | (own_S == SYMBOLS - 1)).sum())
    outside_E = torch.arange(max(outside + more, 0)).to(torch.int32)
    expected, found = (
        join(kernels, symbol_S, outside_E, kind_N, layout) for kernels in (REFERENCE, NUMBA)
    )
    assert (expected is None) == (found is None) == (len(outside_E) != outside)
    if expected is not None and found is not None:
        assert torch.equal(expected, found)


def test_a_known_answer() -> None:
    """Shifts of 0 and 7: 300 is symbol 2 + 16 with digits 12 and 1; 20 is outside."""
    layout = Layout(
        torch.tensor([[0, 7]], dtype=torch.uint8),
        torch.tensor([[4, 9]], dtype=torch.uint8),
        DIGIT_TABLE,
    )
    q_NK = torch.tensor([[-3, 300], [20, -1]], dtype=torch.int32)
    symbol_S, table_S, outside_E = split(NUMBA, q_NK, torch.zeros(2).long(), layout)
    assert symbol_S.tolist() == [13, 18, 31, 15, 12, 31, 1, 3]
    assert table_S.tolist() == [4, 9, 4, 9, 34, 34, 31, 31]
    assert outside_E.tolist() == [20]


def test_other_backends_are_named() -> None:
    other: Backend = "triton"
    with pytest.raises(ValueError, match='backend = "triton"'):
        load("coefficients", other)
