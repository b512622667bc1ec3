"""The CPU kernels equal the reference bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.wire.codecs import values
from thinpipe.pipeline.wire.kernels.cpu import sparse as sparse_cpu
from thinpipe.pipeline.wire.kernels.reference import sparse as sparse_reference
from thinpipe.pipeline.wire.subset import RUN, random_subset

SIZES = (1, 15, 16, 17, 64, 65, 5003)
DTYPES = (torch.float32, torch.bfloat16)
BOTH = (sparse_reference, sparse_cpu)


def poisoned(numel: int) -> torch.Tensor:
    return torch.full((numel,), torch.nan)


def starts(numel: int) -> tuple[torch.Tensor, int]:
    """Runs that include the vector's last, short one, and how many values they have."""
    for step in range(20):
        subset = random_subset(numel, fraction=0.4, seed=1, step=step, bucket=0)
        if subset.size and int(subset.start_R[-1]) + RUN >= numel:
            return subset.start_R, subset.size
    raise AssertionError("no step has the last run")


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_are_gathered_scattered_and_updated_alike(numel: int, dtype: torch.dtype) -> None:
    start, size = starts(numel)
    x, base = values(numel).to(dtype), values(numel, 1).to(dtype)
    sent, mean = values(size, 2), values(size, 3)
    for subtracted in (None, base):
        taken = [poisoned(size) for _ in BOTH]
        for kernels, out in zip(BOTH, taken, strict=True):
            kernels.gather(x, subtracted, start, RUN, out)
        assert torch.equal(*taken)
    ends = [(x.clone(), base.clone(), x.clone()) for _ in BOTH]
    for kernels, (moved, moved_base, put) in zip(BOTH, ends, strict=True):
        kernels.apply_exchanged(sent, mean, start, RUN, moved, moved_base)
        kernels.scatter(sent, start, RUN, put)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert not torch.equal(ends[0][1], base)


def selected_alike(x: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask and values that both backends select."""
    masks = [torch.full((-(-x.numel() // 8),), 0xAA, dtype=torch.uint8) for _ in BOTH]
    chosen = [poisoned(kept) for _ in BOTH]
    for kernels, mask, out in zip(BOTH, masks, chosen, strict=True):
        kernels.select(x, mask, out)
    assert torch.equal(*masks)
    assert torch.equal(*(values.view(torch.int32) for values in chosen))
    return masks[0], chosen[0]


@pytest.mark.parametrize("numel", [*SIZES, 100_003])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.2, 1.0])
def test_kept_values_are_selected_and_placed_alike(numel: int, share: float) -> None:
    x = values(numel)
    mask, chosen = selected_alike(x, max(1, int(share * numel)))
    assert chosen.abs().min() == x.abs().topk(len(chosen)).values[-1]
    placed, added = [poisoned(numel) for _ in BOTH], [-0.0 * x for _ in BOTH]
    for kernels, out, total in zip(BOTH, placed, added, strict=True):
        kernels.place(mask, chosen, out)
        kernels.place_add(mask, chosen, total)
    assert torch.equal(*placed)
    assert torch.equal(placed[0][placed[0] != 0], chosen)
    assert torch.equal(added[0].view(torch.int32), added[1].view(torch.int32))


@given(
    values=st.lists(st.sampled_from([0.0, -1.0, 1.0, 2.5, -2.5, 1e-42]), min_size=1, max_size=90),
    bad=st.lists(st.sampled_from([torch.inf, -torch.inf, torch.nan]), max_size=3),
    part=st.floats(0, 1),
)
@settings(max_examples=80)
def test_ties_and_what_is_not_finite_are_selected_alike(
    values: list[float], bad: list[float], part: float
) -> None:
    x = torch.tensor(values + bad + values)
    _, chosen = selected_alike(x, int(part * x.numel()))
    assert int(chosen.isnan().sum()) == min(bad.count(torch.nan), len(chosen))


@pytest.mark.parametrize("levels", [1, 40])
@pytest.mark.parametrize("k", [1, 1024, 5002])
def test_the_last_tie_may_be_anywhere(levels: int, k: int) -> None:
    draws = torch.Generator().manual_seed(k)
    selected_alike(torch.randint(-levels, levels, (5003,), generator=draws).float(), k)


def test_clustered_values_mislead_the_sample_but_not_the_result() -> None:
    x = torch.randn(200_000) * 1e-3
    x[:64] = 100.0  # the sample sees these only, and sets its bound far too high
    selected_alike(x, 2000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_nan_stays_one_in_every_format(dtype: torch.dtype) -> None:
    start = torch.tensor([0])
    nan = torch.full((4,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for kernels in BOTH:
        out = torch.zeros(4, dtype=dtype)
        kernels.scatter(nan, start, RUN, out)
        assert out.isnan().all()
