"""Exact top-k against torch's, with ties, odd sizes and values that are not finite."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.pipeline.wire.kernels.cpu.topk import select_top


def chosen(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask bytes, values, and the mask as booleans."""
    mask = torch.full((-(-x.numel() // 8),), 0xAA, dtype=torch.uint8)
    kept = torch.full((k,), torch.nan)
    select_top(x, mask, kept)
    flags = (mask.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return mask, kept, flags.flatten()[: x.numel()].bool()


def expected(x: torch.Tensor, k: int) -> torch.Tensor:
    """The first k by falling magnitude, NaN first; a stable sort takes the first of equals."""
    magnitude = x.abs().nan_to_num(nan=torch.inf).double()
    magnitude[x.isnan()] = 1e300
    order = torch.sort(magnitude, descending=True, stable=True).indices[:k]
    return torch.zeros(x.numel(), dtype=torch.bool).scatter_(0, order, True)


@pytest.mark.parametrize("numel", [1, 15, 16, 100_003])
@pytest.mark.parametrize("share", [0.001, 0.2, 1.0])
def test_the_largest_are_chosen_in_order(numel: int, share: float) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    k = max(1, int(share * numel))
    _, kept, flags = chosen(x, k)
    assert torch.equal(flags, expected(x, k))
    assert torch.equal(kept, x[flags])


@given(
    values=st.lists(st.sampled_from([0.0, -1.0, 1.0, 2.5, -2.5, 1e-42]), min_size=1, max_size=90),
    bad=st.lists(st.sampled_from([float("inf"), -float("inf")]), max_size=3),
    part=st.floats(0, 1),
)
@settings(max_examples=80)
def test_ties_are_counted_exactly_and_the_first_win(
    values: list[float], bad: list[float], part: float
) -> None:
    x = torch.tensor(values + bad + values)
    k = int(part * x.numel())
    _, kept, flags = chosen(x, k)
    assert torch.equal(flags, expected(x, k))
    assert torch.equal(kept, x[flags])


@pytest.mark.parametrize("levels", [1, 40])
@pytest.mark.parametrize("k", [1, 1024, 5002])
def test_the_last_tie_may_be_anywhere(levels: int, k: int) -> None:
    x = torch.randint(-levels, levels, (5003,), generator=torch.Generator().manual_seed(k)).float()
    _, kept, flags = chosen(x, k)
    assert torch.equal(flags, expected(x, k))
    assert torch.equal(kept, x[flags])


def test_a_nan_is_never_dropped() -> None:
    x = torch.randn(5000)
    x[1234] = torch.nan
    _, kept, flags = chosen(x, 3)
    assert flags[1234]
    assert kept.isnan().any()


def test_clustered_values_mislead_the_sample_but_not_the_result() -> None:
    x = torch.randn(200_000) * 1e-3
    x[:64] = 100.0  # the sample sees these only, and sets its bound far too high
    _, _, flags = chosen(x, 2000)
    assert torch.equal(flags, expected(x, 2000))


def test_more_than_there_are_is_rejected() -> None:
    with pytest.raises(ValueError, match="k = 5: there are only 4"):
        select_top(torch.zeros(4), torch.zeros(1, dtype=torch.uint8), torch.zeros(5))
