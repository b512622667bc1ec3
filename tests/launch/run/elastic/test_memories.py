"""Replicas of two stages, whose cuts remember samples, lose one of them or a connection."""

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.launch.run.elastic.test_places import AQSGD, FORGETS, TRANSFORM
from tests.launch.run.elastic.test_sections import end
from tests.launch.run.elastic.trained import leave, ranks_of, trains
from tests.often import mostly_slow
from thinpipe.launch.run import training as training_module
from thinpipe.launch.run.elastic import generations
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.view.report.metrics import read_metrics
from thinpipe.pipeline.comm.channel import OutgoingChannel
from thinpipe.pipeline.comm.errors import TransportError

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


def breaks_a_connection(rank: int, port: int, folder: str, at: int, *changes: str) -> list[Held]:
    """That between ranks 0 and 1, in the middle of a step: one end has learned more by then."""
    found, send = [], OutgoingChannel._send

    def broken(channel: OutgoingChannel, m: int, *rest: Any) -> None:
        send(channel, m, *rest)
        if m == 0 and channel._pass.step == at and not broken_at:
            broken_at.append(at)
            raise TransportError("rank 0 -> rank 1: broken")

    broken_at = list[int]()
    if rank == 0:
        OutgoingChannel._send = broken  # type: ignore[method-assign]
    own = (*TWO_BY_TWO, *changes)
    trains(rank, port, folder, *own, each=lambda run, step: found.append(held(run, step)), world=4)
    assert bool(broken_at) == (rank == 0)
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes", mostly_slow([(BOTH,), (TRANSFORM,), (AQSGD, DISK)], lambda case: case == (BOTH,))
)
def test_ends_of_a_cut_stay_equal_as_a_connection_breaks(
    tmp_path: Path, changes: tuple[str, ...]
) -> None:
    """The step is done again, and changes nothing of what is learned."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    changes = (*changes, "gradcomp.method=allreduce")  # others move what servers owe
    broken = ranks_of(tmp_path / "a", 4, breaks_a_connection, 27, *changes)
    undisturbed = ranks_of(tmp_path / "b", 4, loses_a_replica, -1, *changes)
    assert broken == undisturbed
    assert broken[0] == broken[1] != broken[2] == broken[3]


def loses_one_as_all_end(rank: int, port: int, folder: str) -> bool:
    """Rank 3, with its neighbour, once caches are closed: what others gather is gathered again."""
    gathered, gather = list[Any](), training_module.gather_json

    def gone(transport: Any, own: Any) -> Any:
        if rank > 1:
            leave(runs[0])
        gathered.append(own)
        return gather(transport, own)

    def each(run: ElasticTraining, _: int) -> None:
        runs.append(run)
        training_module.gather_json = gone

    runs, own = list[ElasticTraining](), (*TWO_BY_TWO, AQSGD, DISK)
    trains(rank, port, folder, *own, each=each, world=4)
    return bool(gathered)


def loses_ranks(
    rank: int, port: int, folder: str, lost: dict[int, int], replicas: int, *changes: str
) -> tuple[list[Held], list[list[int]]]:
    """Ranks leave after the steps that `lost` says; also the ranks of each one's replica."""
    found, together = list[Held](), list[list[int]]()

    def each(training: ElasticTraining, step: int) -> None:
        found.append(held(training, step))
        (own,) = [ranks for ranks in training._elastic._replicas if rank in ranks]
        together.append(own)
        if lost.get(rank) == step:
            leave(training)

    generations.end_now = end  # type: ignore[assignment]
    own = (*TWO_BY_TWO, f"pipeline.replicas={replicas}", *changes)
    trains(rank, port, folder, *own, each=each, ends=[SystemExit], world=2 * replicas)
    return found, together


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("SCHEDULES", "6"))))
def test_replicas_are_made_again_and_again(tmp_path: Path, seed: int) -> None:
    """Of three, two or three ranks are lost: the ends of each cut hold the same after each step."""
    draw, cuts = random.Random(seed), [AQSGD, BOTH, TRANSFORM][seed % 3]
    method = ["ef_gradients", "allreduce", "cocktail", "demo"][seed % 4]
    ranks = draw.sample(range(1, 6), draw.choice([2, 3]))
    if 1 in ranks:  # as others are left over, three losses in turn may leave no second stage
        ranks = ranks[:2]
    lost = {rank: draw.randint(3, 24) for rank in ranks}
    if seed % 2:  # at once
        lost = dict.fromkeys(lost, min(lost.values()))
    found = ranks_of(tmp_path, 6, loses_ranks, lost, 3, cuts, f"gradcomp.method={method}")
    first, together = found[0]
    by_step = [{h.step: (h, ranks) for h, ranks in zip(*one, strict=True)} for one in found]
    for rank, (own, with_whom) in enumerate(found):
        for at, (mine, ranks) in enumerate(zip(own, with_whom, strict=True)):
            for other in {*ranks} - {rank}:
                theirs, their_ranks = by_step[other].get(mine.step, (None, None))
                if ranks == their_ranks:
                    assert mine == theirs, (rank, mine.step, ranks, lost)
                else:  # one had done a step that another had not, as a rank was lost
                    near = [with_whom[i] for i in (at - 1, at + 1) if 0 <= i < len(own)]
                    assert len(near) < 2 or near != [ranks, ranks], (rank, mine.step, ranks, lost)
    assert together[-1][1] not in lost
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert len(records) == len(first)
    counted = [sum(r.samples or 0 for r in records if r.epoch == epoch) for epoch in (1, 2)]
    assert counted == [SAMPLES, SAMPLES]


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes",
    mostly_slow(
        [
            (AQSGD,),
            (BOTH, "gradcomp.method=cocktail"),
            (TRANSFORM, "gradcomp.method=demo"),
            (FORGETS,),
        ],
        lambda case: case == (AQSGD,),
    ),
)
def test_a_replica_is_made_of_two_whose_ranks_hold_other_samples(
    tmp_path: Path, changes: tuple[str, ...]
) -> None:
    """Rank 3 takes the place of rank 1: that replica writes the run's folder."""
    found = ranks_of(tmp_path, 4, loses_ranks, {1: 9}, 2, *changes)
    first, *others, last = [held for held, _ in found]
    assert [*map(len, others)] == [9, 9]
    assert first[9:] == last[9:]
    assert first[8] != last[8]
    assert {*first[9].samples.values()} == {0 if FORGETS in changes else 3}
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    counted = [sum(r.samples or 0 for r in records if r.epoch == epoch) for epoch in (1, 2)]
    assert counted == [SAMPLES, SAMPLES]
    assert records[-1].loss < records[0].loss - 1


@pytest.mark.dist
@pytest.mark.slow
def test_a_replica_that_is_lost_as_all_end_costs_nothing(tmp_path: Path) -> None:
    assert ranks_of(tmp_path, 4, loses_one_as_all_end) == [True, True, False, False]
    assert (tmp_path / "run/summary.json").exists()
