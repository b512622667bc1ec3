"""A pipeline loses a machine, and another takes its place."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from torch.distributed import TCPStore

from tests.launch.run.elastic.trained import leave, members, trains, write_run
from tests.often import mostly_slow
from tests.training import config
from tests.waiting import PATIENCE_S
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.agreement import Ask
from thinpipe.launch.memory.host import host_needs
from thinpipe.launch.net.ranks.session import TerminatedError
from thinpipe.launch.run.elastic.copies import keepers, newest_common
from thinpipe.launch.run.elastic.redoing import RedoingTraining
from thinpipe.launch.view.report.metrics import StepRecord, read_metrics

STEPS = 40
PIPELINE = (
    "pipeline.replicas=1",
    "pipeline.cuts=[1,2]",
    "pipeline.microbatches=2",
    "model.dropout=0.1",
    "elastic={}",
    "train.verify_every=1",
    "checkpoint.ram_every=4",
    "checkpoint.every_steps=5",
)
RAW = 'boundary=[{forward={kind="raw"},backward={kind="raw"}}]'
AQSGD = 'boundary=[{forward={kind="aqsgd",bits=4},backward={kind="direct",bits=8}}]'
TRANSFORM = 'boundary=[{forward={kind="transform",step=0.6},backward={kind="transform",step=0.6}}]'
FORGETS = TRANSFORM.replace("step=0.6", "memory=false")
"""It learns, and remembers no sample."""
TIED = 'model.tie_embeddings="exact"'
Watch = Callable[[Any, int], None]


def as_place(
    rank: int, port: int, folder: str, changes: tuple[str, ...], each: Watch = lambda *_: None
) -> list[int]:
    """Train as rank 0, 1 or 2, or as one that comes when it should; the steps it was asked for."""
    store, steps = TCPStore("127.0.0.1", port, is_master=False), list[int]()
    own = [*PIPELINE, *changes, f"network.name=host{rank}"]
    if rank > 2:
        store.wait([f"comes{rank}"], timedelta(seconds=PATIENCE_S))
        own.append(f"run.folder={folder}/{rank}")

    def counted(training: Any, step: int) -> None:
        steps.append(step)
        each(training, step)

    trains(rank, port, folder, *own, each=counted, ends=[SystemExit], comes=rank > 2)
    return steps


def lets_in(training: Any, port: int, key: str) -> None:
    """This rank is gone, and another may come."""
    TCPStore("127.0.0.1", port, is_master=False).set(key, "")
    leave(training)


def loses_a_stage(
    rank: int, port: int, folder: str, place: int, at: int, *changes: str
) -> list[int]:
    """A place is left after a step, rank 3 comes."""

    def each(training: Any, step: int) -> None:
        assert isinstance(training, RedoingTraining)
        if rank == place and step == at:
            lets_in(training, port, "comes3")

    return as_place(rank, port, folder, changes, each)


def loses_two(rank: int, port: int, folder: str, *changes: str) -> list[int]:
    """Place 1 is left after step 10 and place 2 after step 27; ranks 3 and 4 come."""

    def each(training: Any, step: int) -> None:
        if (rank, step) in ((1, 10), (2, 27)):
            lets_in(training, port, f"comes{rank + 2}")

    return as_place(rank, port, folder, changes, each)


def told(records: list[StepRecord]) -> list[Any]:
    """What does not depend on time."""
    return [(r.step, r.epoch, r.loss, r.grad_norm, r.lr, r.samples, r.eval) for r in records]


def trained(folder: Path, *run: Any) -> tuple[list[list[int]], list[StepRecord]]:
    """The steps of each rank, and the records; `run` is a function for ranks and arguments."""
    folder.mkdir()
    write_run(folder, layers=3)
    count, function, *rest = run
    steps = members(count, function, str(folder), *rest)
    return steps, read_metrics(folder / "run/metrics.jsonl")


@pytest.mark.dist
@pytest.mark.parametrize(
    "lost",
    mostly_slow(
        [
            (2, 10, (RAW, TIED)),
            (1, 20, (RAW,)),
            (1, 13, (RAW, 'pipeline.schedule="1F1B"')),
            (1, 22, (RAW, "checkpoint.ram_every=50")),  # evaluated after step 20, which is redone
        ],
        lambda case: case[0] == 2,
    ),
)
def test_what_is_learned_is_the_same_bit_for_bit(
    tmp_path: Path, lost: tuple[int, int, tuple[str, ...]]
) -> None:
    """Also if the last step was that of an epoch. Nothing is cached, and nothing is lossy."""
    place, at, changes = lost
    steps, records = trained(tmp_path / "a", 4, loses_a_stage, place, at, *changes)
    left = [steps[other] for other in range(3) if other != place]
    assert left == [[*range(1, STEPS + 1)]] * 2
    assert steps[place] == [*range(1, at + 1)]
    assert steps[3] == [*range(at + 1, STEPS + 1)]
    _, undisturbed = trained(tmp_path / "b", 3, as_place, changes)
    assert told(records) == told(undisturbed)


def stops_in_between(rank: int, port: int, folder: str) -> list[int]:
    """Place 1 is left after step 11; all are asked to stop as they go back to step 8."""
    go_back = RedoingTraining.go_back

    def stopped(training: RedoingTraining, back: Any) -> None:
        go_back(training, back)
        if rank == 0:
            training.agreement.ask(Ask.STOP)

    RedoingTraining.go_back = stopped  # type: ignore[method-assign]
    try:
        return loses_a_stage(rank, port, folder, 1, 11, RAW)
    except TerminatedError:
        return []


@pytest.mark.slow
@pytest.mark.dist
def test_a_stop_while_steps_are_done_again_saves_the_step_there_is(tmp_path: Path) -> None:
    _, records = trained(tmp_path / "a", 4, stops_in_between)
    last = records[-1].step
    assert last in (9, 10, 11)
    root = tmp_path / "a/run/checkpoints"
    assert files.newest(root) == last
    state = files.read_part(root / f"step-{last}", "replica-0.rank-0", verify=False)
    assert state["lr_schedule"]["last_epoch"] == last


@pytest.mark.slow
@pytest.mark.dist
def test_a_second_machine_is_lost_later(tmp_path: Path) -> None:
    """The copies that all go back to then were made after the first had been replaced."""
    steps, records = trained(tmp_path / "a", 5, loses_two, RAW)
    assert steps[0] == [*range(1, STEPS + 1)]
    assert (steps[3], steps[4]) == ([*range(11, STEPS + 1)], [*range(28, STEPS + 1)])
    _, undisturbed = trained(tmp_path / "b", 3, as_place, (RAW,))
    assert told(records) == told(undisturbed)


@pytest.mark.dist
@pytest.mark.parametrize(
    "boundary", mostly_slow([AQSGD, TRANSFORM, FORGETS], lambda case: case == AQSGD)
)
def test_ends_of_a_cut_are_equal_after_every_step(tmp_path: Path, boundary: str) -> None:
    """As `train.verify_every` proves; caches of the new stage's cuts begin anew."""
    _, records = trained(tmp_path / "a", 4, loses_a_stage, 1, 25, boundary)
    assert [record.step for record in records] == [*range(1, STEPS + 1)]
    _, undisturbed = trained(tmp_path / "b", 3, as_place, (boundary,))
    assert told(records)[:20] == told(undisturbed)[:20]
    assert abs(records[-1].loss - undisturbed[-1].loss) < 0.05
    sent = [sum(wire.nbytes for wire in record.wire) for record in (records[30], undisturbed[30])]
    assert boundary == FORGETS or sent[0] > sent[1], "samples are sent as in a first epoch"


def test_a_copy_is_kept_on_another_machine_where_there_is_one() -> None:
    assert keepers(["a", "b", "c"]) == [1, 2, 0]
    assert keepers(["a", "a", "b", "b"]) == [2, 2, 0, 0]
    assert keepers(["a", "a"]) == [1, 0]


def test_all_go_back_to_the_newest_step_that_all_have() -> None:
    held = {0: {"own": [8, 12], "kept": [(2, 8), (2, 12)]}, 2: {"own": [8, 12], "kept": [[1, 8]]}}
    assert newest_common(held, 3) == 8
    held[2]["kept"].append([1, 12])
    assert newest_common(held, 3) == 12
    held[2]["own"].remove(8)
    held[2]["kept"].remove([1, 12])
    assert newest_common(held, 3) is None


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"pipeline": {"cuts": [2], "replicas": 2}}, "of 2 replicas .* set elastic.min_replicas"),
        ({"pipeline": {"cuts": [], "replicas": 1}}, "a single rank has no other to keep its copy"),
        (
            {"pipeline": {"cuts": [2], "replicas": 1, "shards": 2, "device": "cpu"}},
            "pipeline.shards = 2: with it no machine can take the place of another yet",
        ),
        (
            {"gradcomp": {"method": "decentralized"}},
            'gradcomp.method = "decentralized": with it no machine can take the place',
        ),
    ],
)
def test_what_cannot_go_on_is_rejected_by_name(sections: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {
        "pipeline": {"cuts": [2], "replicas": 1},
        "boundary": [],
        "checkpoint": {"ram_every": 5},
    }
    config(**base)
    with pytest.raises(ValidationError, match=message):
        config(**{**base, **sections})


def test_copies_in_ram_are_counted_before_the_start() -> None:
    run = config(pipeline={"cuts": [2], "replicas": 1}, boundary=[], checkpoint={"ram_every": 5})
    plain = config(pipeline={"cuts": [2], "replicas": 1}, boundary=[])
    with_copies, without = (host_needs(each, 8, [1]) for each in (run, plain))
    assert with_copies.kept == 4 * without.copies > 0
    assert with_copies.total == without.total + with_copies.kept
