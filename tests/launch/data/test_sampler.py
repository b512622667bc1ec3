"""Every step's samples: once per epoch, sticky to their replica, a pure function of the step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.launch.data.sampler import EpochSampler


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


@given(_runs(), st.integers(0, 3))
def test_every_sample_is_visited_once_per_epoch(run: dict[str, int], epoch: int) -> None:
    samplers = _samplers(run)
    visited = [sample for sampler in samplers for sample in _epoch_ids(sampler, epoch)]
    assert sorted(visited) == list(range(run["n"] - samplers[0].dropped))
    assert samplers[0].dropped == run["n"] % run["replicas"]


@given(_runs(), st.integers(0, 3))
def test_samples_stick_to_their_replica(run: dict[str, int], epoch: int) -> None:
    for replica, sampler in enumerate(_samplers(run)):
        assert {sample % run["replicas"] for sample in _epoch_ids(sampler, epoch)} == {replica}


@given(_runs(), st.integers(0, 200))
def test_replicas_take_equally_many_samples_in_every_step(run: dict[str, int], step: int) -> None:
    sizes = {len(sampler.ids(step)) for sampler in _samplers(run)}
    assert len(sizes) == 1
    assert 1 <= sizes.pop() <= run["batch_size"] // run["replicas"]


@given(_runs(), st.lists(st.integers(0, 200), min_size=1, max_size=8))
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
def test_impossible_samplers_are_refused(changes: dict[str, int], message: str) -> None:
    choices = {"n": 8, "batch_size": 4, "replicas": 2, "replica": 0, "seed": 0} | changes
    with pytest.raises(ValueError, match=message):
        EpochSampler(choices.pop("n"), **choices)


def test_negative_step_is_refused() -> None:
    sampler = EpochSampler(8, batch_size=4, replicas=1, replica=0, seed=0)
    with pytest.raises(ValueError, match="step = -1: steps count from 0"):
        sampler.ids(-1)
