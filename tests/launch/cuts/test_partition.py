"""The cuts are the exact optimum, and better than torchgpipe's."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchgpipe.balance import balance_cost

from thinpipe.launch.cuts.partition import Problem, best_cuts

COST = st.integers(0, 9)


def problem(costs: Sequence[float], stages: int, **fields: Sequence[Sequence[float]]) -> Problem:
    plain = Problem(
        compute_s=[costs] * stages,
        cut_s=[[0.0] * len(costs)] * (stages - 1),
        fixed_s=[0.0] * stages,
        memory=[[0.0] * len(costs)] * stages,
        memory_limit=[math.inf] * stages,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("equal_devices", "links", "memory"),
    [(True, False, False), (True, True, False), (False, True, True)],
)
@given(data=st.data())
def test_cuts_are_those_of_brute_force(
    data: st.DataObject, equal_devices: bool, links: bool, memory: bool
) -> None:
    of = data.draw(problems(equal_devices=equal_devices, links=links, memory=memory))
    least_s = min(bottleneck_s(of, cuts) for cuts in all_cuts(of))
    if least_s == math.inf:
        with pytest.raises(ValueError, match="do not fit"):
            best_cuts(of)
        return
    found = best_cuts(of)
    assert bottleneck_s(of, found) == least_s
    as_fast = [cuts for cuts in all_cuts(of) if bottleneck_s(of, cuts) == least_s]
    assert total_s(of, found) == min(total_s(of, cuts) for cuts in as_fast)


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
    whole, theirs = problem(costs, stages), accumulate(balance_cost(costs, stages)[:-1])
    assert bottleneck_s(whole, [*theirs]) == torchgpipes
    assert bottleneck_s(whole, best_cuts(whole)) == ours


def test_a_slow_link_and_a_slow_device_move_the_cut() -> None:
    blocks = [1.0] * 6
    assert best_cuts(problem(blocks, 2)) == (3,)
    assert best_cuts(problem(blocks, 2, compute_s=[blocks, [2.0] * 6])) == (4,)
    wide_middle = [[0.0, 1.0, 9.0, 9.0, 9.0, 1.0]]
    assert best_cuts(problem(blocks, 2, cut_s=wide_middle)) in [(1,), (5,)]
