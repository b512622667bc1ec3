"""Replicas that are left, or are made of what is left of others."""

import random

import pytest

from thinpipe.launch.run.elastic.generations import made_whole

TWO_BY_TWO = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("replicas", "gone", "left"),
    [
        (TWO_BY_TWO, {3}, [[0, 1]]),
        (TWO_BY_TWO, {1}, [[0, 3]]),  # its replica writes the run's folder
        (TWO_BY_TWO, {1, 2}, [[0, 3]]),
        (TWO_BY_TWO, {1, 3}, []),  # nobody has the second stage
        (TWO_BY_TWO, {0}, [[2, 3]]),
        ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], {4, 8}, [[0, 1, 2], [3, 7, 5]]),
        ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], {2, 3, 7}, [[0, 1, 5], [6, 4, 8]]),
        ([[0], [1], [2]], {1}, [[0], [2]]),
        ([[0, 3], [4, 5]], {3}, [[0, 5]]),
    ],
)
def test_ranks_of_broken_replicas_are_others_together(
    replicas: list[list[int]], gone: set[int], left: list[list[int]]
) -> None:
    assert made_whole(replicas, gone, cold=set()) == left


def test_no_rank_without_state_takes_the_place_of_another() -> None:
    assert made_whole(TWO_BY_TWO, {1}, cold={2, 3}) == [[2, 3]]
    assert made_whole([*TWO_BY_TWO, [4, 5]], {1}, cold={4, 5}) == [[0, 3], [4, 5]]
    assert made_whole([*TWO_BY_TWO, [4, 5]], {3, 4}, cold={4, 5}) == [[0, 1]]


@pytest.mark.parametrize("seed", range(50))
def test_as_many_are_left_as_the_rarest_stage_has_ranks(seed: int) -> None:
    draw = random.Random(seed)
    stages, count = draw.randint(1, 4), draw.randint(1, 5)
    replicas = [[*range(at * stages, (at + 1) * stages)] for at in range(count)]
    gone = {*draw.sample(range(1, stages * count), draw.randint(0, stages * count - 1))}
    left = made_whole(replicas, gone, cold=set())
    stay = [rank for ranks in left for rank in ranks]
    rarest = min(sum(rank not in gone for rank in at) for at in zip(*replicas, strict=True))
    assert len({*stay} - gone) == len(stay) == len(left) * stages
    assert all(rank % stages == place for ranks in left for place, rank in enumerate(ranks))
    assert rarest - len(left) in (0, 1)
    assert len(left) == rarest or 0 in stay
    assert (0 in stay) == (rarest > 0)
