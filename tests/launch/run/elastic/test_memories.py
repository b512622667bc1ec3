"""Replicas of two stages lose one whose cuts remember samples, and get one that knows none."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launch.run.elastic.test_places import AQSGD, TRANSFORM
from tests.launch.run.elastic.trained import leave, ranks_of, trains
from tests.often import mostly_slow
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.view.report.metrics import read_metrics

SAMPLES = 120  # of an epoch; a replica has 3 in each of 20 steps
TWO_BY_TWO = (
    "pipeline.replicas=2",
    "pipeline.cuts=[1]",
    "pipeline.microbatches=2",
    "train.verify_every=1",
)
BOTH = 'boundary=[{forward={kind="aqsgd",bits=4},backward={kind="aqsgd",bits=8}}]'
DISK = 'memory={tier="disk"}'


class Held(NamedTuple):
    """After a step, by direction: the samples that are known, and a digest of all their rows."""

    step: int
    samples: dict[int, int]
    digests: dict[int, str]


def held(training: ElasticTraining, step: int) -> Held:
    memories: dict[int, Any] = {
        channel.codec.direction: channel.codec.memory
        for channel in training.built.engine.channels
        if channel.codec.memory is not None
    }
    samples = {direction: len(memory) for direction, memory in memories.items()}
    return Held(step, samples, {direction: m.digest() for direction, m in memories.items()})


def loses_a_replica(rank: int, port: int, folder: str, at: int, *changes: str) -> list[Held]:
    """Ranks 2 and 3 leave after a step, in the next one as others see it."""
    found = []

    def each(training: ElasticTraining, step: int) -> None:
        found.append(held(training, step))
        if rank > 1 and step == at:
            leave(training)

    own = (*TWO_BY_TWO, *changes)
    trains(rank, port, folder, *own, each=each, ends=[SystemExit], world=4)
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes",
    mostly_slow([(AQSGD,), (BOTH,), (TRANSFORM,), (AQSGD, DISK)], lambda case: case == (AQSGD,)),
)
@pytest.mark.parametrize(
    ("at", "had", "has"),
    [
        (9, 27, SAMPLES),  # the other's are first visits, in this epoch or the next
        (27, 60, SAMPLES - 7 * 3),  # the step that is done again sends changes
    ],
)
def test_ends_of_a_cut_stay_equal_as_another_replica_leaves(
    tmp_path: Path, at: int, had: int, has: int, changes: tuple[str, ...]
) -> None:
    first, second, *_ = ranks_of(tmp_path, 4, loses_a_replica, at, *changes)
    assert first == second
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    counted = [sum(r.samples or 0 for r in records if r.epoch == epoch) for epoch in (1, 2)]
    assert counted == [SAMPLES, SAMPLES]
    assert [{*first[step - 1].samples.values()} for step in (at, len(records))] == [{had}, {has}]
