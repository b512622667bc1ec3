"""Coefficients as symbols: they are those described, and come back."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinpipe.pipeline.wire.kernels.coefficients import SYMBOLS, Layout
from thinpipe.pipeline.wire.kernels.cpu import coefficients as kernels

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


def split(q_NK: Tensor, kind_N: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols, their tables, and the numbers next to them."""
    symbol_S = torch.full((layout.symbols(kind_N),), 0xEE, dtype=torch.uint8)
    table_S = symbol_S.clone()
    outside_E = torch.full((q_NK.numel(),), -1, dtype=torch.int32)
    count = kernels.split(q_NK, kind_N, layout, symbol_S, outside_E)
    kernels.tables(kind_N, layout, table_S)
    return symbol_S, table_S, outside_E[:count]


def split_one_by_one(
    q_NK: Tensor, kind_N: Tensor, layout: Layout
) -> tuple[list[int], list[int], list[int]]:
    """The text of `kernels/coefficients.py`, number by number."""
    shift_n, tables = layout.shift_TK[kind_N].flatten().tolist(), layout.table_TK[kind_N]
    q_n = q_NK.flatten().tolist()
    symbols = [min(max((q >> h) + 16, 0), 31) for q, h in zip(q_n, shift_n, strict=True)]
    table_S, outside = tables.flatten().tolist(), [s in (0, 31) for s in symbols]
    for lower in range(0, max(shift_n, default=0), 5):
        for q, h, beyond in zip(q_n, shift_n, outside, strict=True):
            if (width := min(h - lower, 5)) > 0:
                symbols.append(0 if beyond else q >> lower & ((1 << width) - 1))
                table_S.append(layout.digit_table + width)
    return symbols, table_S, [q for q, beyond in zip(q_n, outside, strict=True) if beyond]


def join(symbol_S: Tensor, outside_E: Tensor, kind_N: Tensor, layout: Layout) -> Tensor | None:
    q_NK = torch.full((len(kind_N), layout.shift_TK.shape[1]), -1, dtype=torch.int32)
    return q_NK if kernels.join(symbol_S, outside_E, kind_N, layout, q_NK) else None


@settings(max_examples=100, deadline=None)
@given(messages())
def test_symbols_are_those_described_and_numbers_come_back(
    message: tuple[Tensor, Tensor, Layout],
) -> None:
    q_NK, kind_N, layout = message
    symbol_S, table_S, outside_E = split(*message)
    found = symbol_S.tolist(), table_S.tolist(), outside_E.tolist()
    assert found == split_one_by_one(*message)
    again_NK = join(symbol_S, outside_E, kind_N, layout)
    assert again_NK is not None
    assert torch.equal(again_NK, q_NK)


@settings(max_examples=100, deadline=None)
@given(messages(), st.integers(0, 2**31), st.integers(-2, 2))
def test_too_few_or_too_many_numbers_are_noticed(
    message: tuple[Tensor, Tensor, Layout], seed: int, more: int
) -> None:
    """With any symbols, as damaged bytes give."""
    q_NK, kind_N, layout = message
    generator = torch.Generator().manual_seed(seed)
    count = layout.symbols(kind_N)
    symbol_S = torch.randint(SYMBOLS, (count,), generator=generator).to(torch.uint8)
    own_S = symbol_S[: q_NK.numel()]
    outside = int(((own_S == 0) | (own_S == SYMBOLS - 1)).sum())
    outside_E = torch.arange(max(outside + more, 0)).to(torch.int32)
    found = join(symbol_S, outside_E, kind_N, layout)
    assert (found is None) == (len(outside_E) != outside)


def test_a_known_answer() -> None:
    """Shifts of 0 and 7: 300 is symbol 2 + 16 with digits 12 and 1; 20 is outside."""
    layout = Layout(
        torch.tensor([[0, 7]], dtype=torch.uint8),
        torch.tensor([[4, 9]], dtype=torch.uint8),
        DIGIT_TABLE,
    )
    q_NK = torch.tensor([[-3, 300], [20, -1]], dtype=torch.int32)
    symbol_S, table_S, outside_E = split(q_NK, torch.zeros(2).long(), layout)
    assert symbol_S.tolist() == [13, 18, 31, 15, 12, 31, 1, 3]
    assert table_S.tolist() == [4, 9, 4, 9, 34, 34, 31, 31]
    assert outside_E.tolist() == [20]
