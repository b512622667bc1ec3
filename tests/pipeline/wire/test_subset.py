"""Laws of the random subsets: who takes part when, on every rank alike."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.pipeline.wire.header import crc32
from thinpipe.pipeline.wire.subset import RUN, Subset, exact_fraction, random_subset

FRACTIONS = (0.15, 0.4, 1.0, 1 / 3, 0.075)


def drawn(numel: int, fraction: float | Fraction, step: int, *, seed: int = 7) -> Subset:
    return random_subset(numel, fraction=fraction, seed=seed, step=step, bucket=3)


def taking_part(subset: Subset) -> torch.Tensor:
    """1 where a coordinate is chosen."""
    chosen = torch.zeros(subset.numel)
    subset.scatter(torch.ones(subset.size), chosen)
    return chosen


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("numel", [1, 65, 5000, 64 * 60])
def test_every_coordinate_takes_part_equally_often_in_every_window(
    fraction: float, numel: int
) -> None:
    part = exact_fraction(fraction)
    for window in (0, 5):
        steps = range(window * part.denominator, (window + 1) * part.denominator)
        times = torch.stack([taking_part(drawn(numel, fraction, step)) for step in steps]).sum(0)
        assert (times == part.numerator).all()


@pytest.mark.parametrize("fraction", [0.15, 1 / 3])
def test_nobody_waits_longer_than_two_rounds(fraction: float) -> None:
    part = exact_fraction(fraction)
    last, longest = torch.zeros(4000), 0.0
    for step in range(1, 4 * part.denominator):
        chosen = taking_part(drawn(4000, fraction, step)).bool()
        longest = max(longest, float((step - last)[chosen].max()))
        last[chosen] = step
    assert longest < 2 * -(-part.denominator // part.numerator)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_the_share_is_the_ratio_and_not_one_over_a_whole_number(fraction: float) -> None:
    runs = 12_000
    for step in range(4):
        assert drawn(runs * RUN, fraction, step).size == round(runs * fraction) * RUN


def test_a_thousand_steps_have_no_short_cycle() -> None:
    seen = {drawn(200 * RUN, 0.1, step).start_R.numpy().tobytes() for step in range(1000)}
    assert len(seen) == 1000


def test_pairs_of_runs_meet_as_often_as_chance_has_it() -> None:
    runs, rounds = 40, 400
    together = torch.zeros(runs, runs)
    for window in range(rounds):
        chosen = taking_part(drawn(runs * RUN, 0.1, 10 * window))[::RUN]
        together += chosen.outer(chosen)
    off = together[~torch.eye(runs, dtype=torch.bool)]
    expected = rounds * (4 / runs) * (3 / (runs - 1))
    assert (off - expected).abs().max() < 6 * expected**0.5
    assert (together.diag() - rounds / 10).abs().max() < 6 * (rounds / 10) ** 0.5


def test_equal_arguments_give_equal_subsets_and_leave_global_state_alone() -> None:
    state = torch.random.get_rng_state()
    first = drawn(10_000, 0.1, 4)
    torch.manual_seed(1)
    torch.randn(5)
    again = drawn(10_000, 0.1, 4)
    torch.random.set_rng_state(state)
    assert torch.equal(first.start_R, again.start_R)
    others = [
        random_subset(10_000, fraction=0.1, seed=seed, step=step, bucket=bucket)
        for seed, step, bucket in ((8, 4, 3), (7, 5, 3), (7, 14, 3), (7, 4, 2), (7 + 2**40, 4, 3))
    ]
    assert all(not torch.equal(first.start_R, other.start_R) for other in others)


@pytest.mark.parametrize(
    ("runs", "fraction", "digest"),
    [
        *((1, 0.5, 3971697493), (3, 0.5, 140372158)),
        *((64, 0.3, 3808294879), (12_345, 0.15, 2845975211)),
    ],
)
def test_the_runs_of_a_key_never_change(runs: int, fraction: float, digest: int) -> None:
    """Part of the format: ranks of different versions must not draw different subsets."""
    assert (drawn(40 * RUN, 0.1, 3).start_R // RUN).tolist() == [8, 14, 27, 31]
    assert crc32(torch.cat([drawn(runs * RUN, fraction, s).start_R for s in range(4)])) == digest


@given(
    numel=st.integers(0, 700),
    part=st.sampled_from([0.1, 0.4, 0.5, 1.0]),
    step=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=40)
def test_gather_and_scatter_touch_the_chosen_places_only(
    numel: int, part: float, step: int, dtype: torch.dtype
) -> None:
    subset, x = drawn(numel, part, step), torch.randn(numel).to(dtype)
    chosen = taking_part(subset).bool()
    taken, out = torch.full((subset.size,), torch.nan), torch.zeros(numel, dtype=dtype)
    subset.gather(x, taken)
    assert torch.equal(taken, x[chosen].float())
    subset.scatter(taken, out)
    assert torch.equal(out, torch.where(chosen, x, torch.zeros_like(x)))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.5, 0.123456])
def test_what_is_no_ratio_is_rejected(fraction: float) -> None:
    with pytest.raises(ValueError, match=f"fraction = {fraction}"):
        drawn(100, fraction, 0)


@pytest.mark.parametrize("numel", [499, 501])
def test_tensors_of_another_size_are_rejected_before_memory_is_touched(numel: int) -> None:
    subset = drawn(500, 0.4, 0)
    chosen, wrong = torch.zeros(subset.size), torch.zeros(numel)
    with pytest.raises(ValueError, match=f"a tensor of {numel} values: needs 500"):
        subset.gather(wrong, chosen)
    with pytest.raises(ValueError, match=f"a tensor of {numel} values: needs 500"):
        subset.apply_exchanged(chosen, chosen, torch.zeros(500), wrong)
    with pytest.raises(ValueError, match=f"needs {subset.size}"):
        subset.scatter(torch.zeros(subset.size + 1), torch.zeros(500))
