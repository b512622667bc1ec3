"""Replicas that meet every few steps lose one, also as they meet, and let one in before they do."""

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.launch.run.elastic.trained import as_rank, leave, ranks_of, stop_asked, train, trains
from tests.often import mostly_slow
from tests.waiting import PATIENCE_S
from thinpipe.gradcomp.methods.diloco import DiLoCo
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.reshard import part_name
from thinpipe.launch.run.elastic import training
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.run.proof import digest
from thinpipe.launch.view.report.metrics import read_metrics
from thinpipe.pipeline.mesh import Mesh

pytestmark = pytest.mark.dist
INTERVAL, LOST = 3, 7
METHODS = ["diloco", "sparse_loco", "async_average"]
_SAVING_S = 2.0  # by then the others wait for the exchange, to save what it finds


def loses_and_lets_in(  # noqa: C901  # what each rank does, in turn
    rank: int, port: int, folder: str, method: str, overlap: int, lost_as_they_meet: bool
) -> dict[str, Any]:
    """Rank 2 is lost after step 7, or as they meet after 9 (overlapped: 6, under way, and 7).

    Rank 1 is a step behind as rank 0 goes on, or has seen that rank 2 is lost. Rank 3 comes; then
    all stop.

    Digests of what all hold alike, by the steps that are done.
    """
    store = TCPStore("127.0.0.1", port, is_master=False)
    interval, after = INTERVAL + overlap, LOST - overlap // 2
    options = f"{{interval={interval}, overlap={overlap}, bucket_mb=0.02}}"
    changes = [f"gradcomp.method={method}", f"gradcomp.{method}={options}"]
    changes += ["train.epochs=400", f"train.verify_every={interval}"]
    alike, hold = dict[int, int](), ElasticTraining._hold
    sent, bring_up = list[int](), training.bring_up

    def count(built: Any, *arguments: Any, **more: Any) -> int:
        state = built.optimizer.state_dict()["state"].values()
        sent.append(bring_up(built, *arguments, **more))
        sent.append(sum(moments["exp_avg"].nbytes for moments in state))
        return sent[0]

    training.bring_up = count

    def meet(run: ElasticTraining, exchange: Any) -> None:
        if rank == 2 and lost_as_they_meet and run.done > after:
            leave(run)
        hold(run, exchange)

    def settle(run: ElasticTraining) -> None:
        store.set("waits", "")
        settles(run)

    def each(run: ElasticTraining, step: int) -> None:
        alike[step] = digest(run.built.sync.alike())
        if rank == 0 and step == after + 1:
            store.set("waits", "")
        if rank == 1 and step == after:
            store.wait(["waits"], timedelta(seconds=PATIENCE_S))
        if rank == 2 and step == after and not lost_as_they_meet:
            leave(run)
        if step == after + 2 * interval:
            store.set("comes", "")
        if rank == 3 and len(alike) == 2 * interval:
            store.set("joined", "")
        stop_asked(run, store, "joined")

    settles = ElasticTraining.settle
    ElasticTraining._hold, ElasticTraining.settle = meet, settle  # type: ignore[method-assign]
    if rank == 3:
        store.wait(["comes"])
        changes.append(f"run.folder={folder}/elsewhere")
    trains(rank, port, folder, *changes, each=each, comes=rank == 3)
    return {"alike": alike, "begins": min(alike), "sent": sent}


@pytest.mark.parametrize("lost_as_they_meet", mostly_slow([False, True], bool))
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("method", mostly_slow(METHODS, "sparse_loco".__eq__))
def test_replicas_of_local_steps_go_on_and_let_one_in(
    tmp_path: Path, method: str, overlap: int, lost_as_they_meet: bool
) -> None:
    first, second, lost, third = ranks_of(
        tmp_path, 4, loses_and_lets_in, method, overlap, lost_as_they_meet
    )
    assert first["alike"] == second["alike"]
    assert max(lost["alike"]) == (9 - overlap if lost_as_they_meet else LOST - overlap // 2)
    assert first["alike"].items() >= lost["alike"].items()
    sent, weights = first["sent"]
    most = weights * (2 if method == "diloco" else 1)
    assert sent in (0, most), "moments came ahead, and weights if nobody has met since"
    assert (third["begins"] - 1) % (INTERVAL + overlap) == 0, "it came as they met"
    assert first["alike"].items() >= third["alike"].items()
    assert len({*third["alike"].values()}) >= 2, "they have met since"
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    counts = [record.samples for record in records]
    assert counts[LOST + 1 :].count(4) >= 1
    since = records[third["begins"] - 1 :]
    whole = {
        now.samples for now, then in zip(since, since[2:], strict=False) if now.epoch == then.epoch
    }
    assert whole == {6}, "but for the last two steps of an epoch: all have one in each"
    by_epoch = [sum(r.samples or 0 for r in records if r.epoch == epoch) for epoch in (1, 2)]
    assert by_epoch[0] == 120


def saves_between_exchanges(rank: int, port: int, folder: str) -> None:
    """Rank 1 is lost after step 7; the next exchange is before step 40."""
    changes = ["gradcomp.method=diloco", "gradcomp.diloco={interval=40, bucket_mb=0.02}"]
    changes += ["checkpoint.every_steps=4", "train.max_steps=30", "train.epochs=4"]

    def each(run: ElasticTraining, step: int) -> None:
        if rank == 1 and step == LOST:
            leave(run)
        time.sleep(0.1)  # a save takes longer than a step

    trains(rank, port, folder, *changes, each=each)


def test_a_save_before_the_others_have_met_is_of_those_who_are_left(tmp_path: Path) -> None:
    """It can be resumed with two replicas: its parts are theirs."""
    ranks_of(tmp_path, 3, saves_between_exchanges)
    saved = {manifest.step: manifest for manifest in files.complete(tmp_path / "run/checkpoints")}
    between = [manifest for step, manifest in saved.items() if LOST + 1 < step < 30]
    assert between, saved.keys()
    for manifest in between:
        whole = manifest.meta["config"]["pipeline"]["replicas"]
        names = {part_name(Mesh(1, whole, rank)) for rank in range(whole)}
        assert {part.name for part in manifest.parts} == names, manifest.step
    assert {manifest.meta["config"]["pipeline"]["replicas"] for manifest in between} == {2}


def saves_while_an_exchange_fails(rank: int, port: int, folder: str) -> list[int]:
    """Rank 1 is lost in the exchange that begins before the ninth step, as all save after it."""
    changes = ["gradcomp.method=diloco", "gradcomp.diloco={interval=8, overlap=4, bucket_mb=0.02}"]
    changes += ["checkpoint.every_steps=9", "train.max_steps=20"]
    update, done = DiLoCo.update, [0]
    with suppress(SystemExit), as_rank(rank, port, folder, *changes) as rank_run:

        def lost(outer: DiLoCo, *arguments: Any) -> Any:
            if rank == 1:
                time.sleep(_SAVING_S)
                raise SystemExit  # no error, which would end the run
            return update(outer, *arguments)

        DiLoCo.update = lost  # type: ignore[assignment, method-assign]
        try:
            train(rank_run, lambda _, step: done.append(step))
        except SystemExit:
            training = rank_run._training
            assert isinstance(training, ElasticTraining)
            leave(training)
    return done


def test_a_save_in_an_exchange_that_fails_ends_nobody(tmp_path: Path) -> None:
    first, lost, third = ranks_of(tmp_path, 3, saves_while_an_exchange_fails)
    assert max(first) == max(third) == 20
    assert max(lost) < 10
    saved = [manifest.step for manifest in files.complete(tmp_path / "run/checkpoints")]
    assert 20 in saved
    assert 9 not in saved
