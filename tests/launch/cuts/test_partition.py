"""The cuts are the exact optimum, and better than torchgpipe's."""

import math
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchgpipe.balance import balance_cost

from thinpipe.launch.cuts.partition import Problem, best_cuts

COST = st.integers(0, 9)


def problem(costs: Sequence[float], stages: int) -> Problem:
    return Problem(
        compute_s=[costs] * stages,
        cut_s=[[0.0] * len(costs)] * (stages - 1),
        fixed_s=[0.0] * stages,
        memory=[[0.0] * len(costs)] * stages,
        memory_limit=[math.inf] * stages,
    )


@st.composite
def problems(draw: st.DrawFn, *, equal_devices: bool, links: bool, memory: bool) -> Problem:
    blocks = draw(st.integers(1, 12))
    stages = draw(st.integers(1, min(blocks, 5)))
    row = st.lists(COST, min_size=blocks, max_size=blocks)
    costs = [draw(row)] * stages if equal_devices else [draw(row) for _ in range(stages)]
    limit = st.integers(0, 40) if memory else st.just(math.inf)
    return Problem(
        compute_s=costs,
        cut_s=[draw(row) if links else [0] * blocks for _ in range(stages - 1)],
        fixed_s=[draw(COST) if links else 0 for _ in range(stages)],
        memory=[draw(row) for _ in range(stages)],
        memory_limit=[draw(limit) for _ in range(stages)],
    )


def all_cuts(of: Problem) -> list[tuple[int, ...]]:
    return list(combinations(range(1, of.blocks), of.stages - 1))


def bottleneck_s(of: Problem, cuts: Sequence[int]) -> float:
    """Time of the slowest stage or link; infinite if a stage does not fit its memory."""
    times = [of.cut_s[s][cut] for s, cut in enumerate(cuts)]
    for s, (first, stop) in enumerate(pairwise((0, *cuts, of.blocks))):
        fits = sum(of.memory[s][first:stop]) <= of.memory_limit[s]
        times.append(sum(of.compute_s[s][first:stop]) + of.fixed_s[s] if fits else math.inf)
    return max(times)


def total_s(of: Problem, cuts: Sequence[int]) -> float:
    bounds = (0, *cuts, of.blocks)
    compute = [sum(of.compute_s[s][bounds[s] : bounds[s + 1]]) for s in range(of.stages)]
    return sum(compute) + sum(of.cut_s[s][cut] for s, cut in enumerate(cuts))


def check_against_brute_force(of: Problem) -> None:
    least_s = min(bottleneck_s(of, cuts) for cuts in all_cuts(of))
    if least_s == math.inf:
        with pytest.raises(ValueError, match="do not fit"):
            best_cuts(of)
        return
    found = best_cuts(of)
    assert bottleneck_s(of, found) == least_s
    as_fast = [cuts for cuts in all_cuts(of) if bottleneck_s(of, cuts) == least_s]
    assert total_s(of, found) == min(total_s(of, cuts) for cuts in as_fast)


@given(problems(equal_devices=True, links=False, memory=False))
def test_equal_devices_are_cut_exactly(of: Problem) -> None:
    check_against_brute_force(of)


@given(problems(equal_devices=True, links=True, memory=False))
def test_links_are_counted_exactly(of: Problem) -> None:
    check_against_brute_force(of)


@given(problems(equal_devices=False, links=True, memory=True))
def test_unequal_devices_with_little_memory_are_cut_exactly(of: Problem) -> None:
    check_against_brute_force(of)


def load_of(costs: Sequence[int], sizes: Sequence[int]) -> int:
    stops = list(accumulate(sizes))
    return max(sum(costs[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True))


@pytest.mark.parametrize(
    ("costs", "stages", "ours", "torchgpipes"),
    [
        ([1] * 30, 8, 4, 9),  # equal blocks
        ([3, *[10] * 24, 15], 8, 40, 45),  # embedding, 24 blocks, a heavy head
    ],
)
def test_transformers_are_balanced_better_than_by_torchgpipe(
    costs: list[int], stages: int, ours: int, torchgpipes: int
) -> None:
    assert load_of(costs, balance_cost(costs, stages)) == torchgpipes
    whole = problem(costs, stages)
    assert bottleneck_s(whole, best_cuts(whole)) == ours


def test_a_slow_link_and_a_slow_device_move_the_cut() -> None:
    equal = problem([1.0] * 6, 2)
    assert best_cuts(equal) == (3,)
    half_as_fast = Problem(
        [[1.0] * 6, [2.0] * 6], equal.cut_s, equal.fixed_s, equal.memory, equal.memory_limit
    )
    assert best_cuts(half_as_fast) == (4,)
    wide_middle = [[0.0, 1.0, 9.0, 9.0, 9.0, 1.0]]
    assert best_cuts(
        Problem(equal.compute_s, wide_middle, equal.fixed_s, equal.memory, equal.memory_limit)
    ) in [(1,), (5,)]


def test_more_stages_than_blocks_are_rejected() -> None:
    with pytest.raises(ValueError, match="use at most 2"):
        problem([1.0, 1.0], 3)
