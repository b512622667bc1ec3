"""Every step's samples: once per epoch, sticky to their replica, a pure function of the step."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.launch.data.sampler import Change, EpochSampler, paced


@st.composite
def _runs(draw: st.DrawFn) -> dict[str, int]:
    replicas = draw(st.integers(1, 5))
    return {
        "n": draw(st.integers(replicas, 60)),
        "batch_size": replicas * draw(st.integers(1, 8)),
        "replicas": replicas,
        "seed": draw(st.integers(0, 2**31)),
    }


def _samplers(run: dict[str, int]) -> list[EpochSampler]:
    n, replicas = run["n"], run["replicas"]
    rest = {"batch_size": run["batch_size"], "replicas": replicas, "seed": run["seed"]}
    return [EpochSampler(n, replica=replica, **rest) for replica in range(replicas)]


def _epoch_ids(sampler: EpochSampler, epoch: int) -> list[int]:
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    return torch.cat([sampler.ids(step) for step in steps]).tolist()


@settings(max_examples=40)
@given(_runs(), st.integers(0, 3))
def test_every_sample_is_visited_once_per_epoch_by_its_replica(
    run: dict[str, int], epoch: int
) -> None:
    samplers, visited = _samplers(run), []
    for replica, sampler in enumerate(samplers):
        own = _epoch_ids(sampler, epoch)
        assert {sample % run["replicas"] for sample in own} == {replica}
        visited += own
    assert sorted(visited) == list(range(run["n"] - run["n"] % run["replicas"]))
    for step in samplers[0].steps_of(epoch):
        sizes = {len(sampler.ids(step)) for sampler in samplers}
        assert len(sizes) == 1
        assert 1 <= sizes.pop() <= run["batch_size"] // run["replicas"]


@settings(max_examples=20)
@given(_runs(), st.lists(st.integers(0, 200), min_size=1, max_size=4))
def test_ids_depend_on_the_step_alone(run: dict[str, int], steps: list[int]) -> None:
    used = _samplers(run)[0]
    for step in steps:
        ids = used.ids(step)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, _samplers(run)[0].ids(step))
        ids.fill_(-1)
        assert torch.equal(used.ids(step), _samplers(run)[0].ids(step))


def test_only_the_last_step_of_an_epoch_is_short() -> None:
    sampler = EpochSampler(10, batch_size=4, replicas=1, replica=0, seed=0)
    assert sampler.steps_per_epoch == 3
    assert [len(sampler.ids(step)) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    assert [sampler.epoch(step) for step in range(6)] == [0, 0, 0, 1, 1, 1]


def test_order_changes_with_epoch_and_seed() -> None:
    sampler = EpochSampler(64, batch_size=8, replicas=1, replica=0, seed=0)
    other = EpochSampler(64, batch_size=8, replicas=1, replica=0, seed=1)
    assert _epoch_ids(sampler, 0) != _epoch_ids(sampler, 1)
    assert _epoch_ids(sampler, 0) != _epoch_ids(other, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 7}, r"batch_size = 7: .* over 2 replicas; use 8"),
        ({"batch_size": 0}, r"batch_size = 0: .* use 2"),
        ({"replica": 2}, r"replica = 2: there are 2 replicas; use 0 to 1"),
        ({"n": 1}, r"1 training sequences for 2 replicas: .* use at least 2"),
    ],
)
def test_impossible_samplers_are_rejected(changes: dict[str, int], message: str) -> None:
    choices = {"n": 8, "batch_size": 4, "replicas": 2, "replica": 0, "seed": 0} | changes
    with pytest.raises(ValueError, match=message):
        EpochSampler(choices.pop("n"), **choices)


def test_negative_step_is_rejected() -> None:
    sampler = EpochSampler(8, batch_size=4, replicas=1, replica=0, seed=0)
    with pytest.raises(ValueError, match="step = -1: steps count from 0"):
        sampler.ids(-1)


@st.composite
def _changed_runs(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """A run, and the numbers of its replicas with how many steps each takes."""
    batch = draw(st.sampled_from([4, 6, 12]))
    n = draw(st.integers(batch, 50))
    fitting = [number for number in range(1, batch + 1) if batch % number == 0]
    parts = draw(
        st.lists(st.tuples(st.sampled_from(fitting), st.integers(0, 9)), min_size=2, max_size=3)
    )
    alike = draw(st.booleans())
    run = {"n": n, "batch_size": batch, "seed": draw(st.integers(0, 99)), "alike": alike}
    return {**run, "shuffle": draw(st.booleans())}, parts


def _visits(run: dict[str, Any], parts: list[tuple[int, int]]) -> dict[int, list[int]]:
    """What counted in each epoch; the last part also finishes the epoch after its first."""
    visited: dict[int, list[int]] = {}
    changes: list[Change] = []
    step = 0
    for place, (replicas, count) in enumerate(parts):
        numbers = range(replicas)
        samplers = [
            EpochSampler(**run, replicas=replicas, replica=r, changes=changes) for r in numbers
        ]
        stop = step + count
        if place == len(parts) - 1:
            stop = samplers[0].steps_of(samplers[0].epoch(step) + 1).stop
        for now in range(step, stop):
            ids = [sampler.ids(now) for sampler in samplers]
            sizes = {len(own) for own in ids}
            assert min(sizes) >= 1
            assert max(sizes) <= min(sizes) + (not run["alike"])
            assert max(sizes) <= run["batch_size"] // replicas + 1
            counted = [sampler.counted(now) for sampler in samplers]
            assert sum(counted) == samplers[0].samples(now)
            for sampler, own, count in zip(samplers, ids, counted, strict=True):
                assert len(own.unique()) == len(own), "no sample twice in a step of a replica"
                assert torch.isin(own, sampler.all_ids()).all()
                visited.setdefault(sampler.epoch(now), []).extend(own[:count].tolist())
        step = stop
        changes.append(Change(step, replicas, run["batch_size"] // replicas, 0))
    return visited


@settings(max_examples=40)
@given(_changed_runs())
def test_a_change_of_replicas_repeats_no_sample(run: tuple[dict[str, Any], Any]) -> None:
    for epoch, visited in _visits(*run).items():
        assert len(set(visited)) == len(visited), epoch


@pytest.mark.parametrize(
    ("n", "batch", "parts"),
    [
        (41, 4, [(1, 5), (2, 0)]),
        (41, 12, [(2, 2), (3, 0)]),
        (41, 4, [(1, 10), (2, 0)]),  # one is left, for two
        (41, 4, [(2, 3), (4, 0)]),
        (41, 4, [(4, 9), (1, 0)]),
        (50, 12, [(3, 1), (2, 1), (6, 1), (1, 0)]),
    ],
)
@pytest.mark.parametrize("alike", [False, True])
def test_every_sample_counts_once_where_replicas_change(
    n: int, batch: int, parts: list[tuple[int, int]], alike: bool
) -> None:
    run = {"n": n, "batch_size": batch, "seed": 3, "alike": alike}
    visited = _visits(run, parts)
    assert sorted(visited[0]) == list(range(n))
    last = parts[-1][0]
    assert sorted(visited[1]) == list(range(n - n % last))


def test_too_few_samples_without_masks_are_left_out_and_counted() -> None:
    sampler = EpochSampler(
        41, batch_size=4, replicas=2, replica=0, seed=0, changes=[Change(10, 1, 4, 22)], masks=False
    )
    assert sampler.left_out == 1
    assert list(sampler.steps_of(0)) == []
    assert sampler.steps_of(1) == range(10, 20)


def test_the_pace_has_no_jump_and_ends_where_it_was_to_end() -> None:
    changes = [Change(5, 1, 4, 22), Change(8, 2, 2, 21)]
    paces = [paced(step, changes, 25) for step in range(26)]
    assert paces[:6] == [0, 1, 2, 3, 4, 5]
    assert paces[25] == pytest.approx(22)
    ahead = [after - before for before, after in itertools.pairwise(paces)]
    assert ahead[5:8] == pytest.approx([17 / 16] * 3)
    assert ahead[8:] == pytest.approx([(17 - 3 * 17 / 16) / 17] * 17)
    assert paced(7, [], 22) == 7
