"""Replicas that come to a run that trains, and those that it may not have."""

import shutil
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed import TCPStore

from tests.launch.run.elastic.trained import leave, ranks_of, stop_asked, trains
from tests.often import mostly_slow
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.manifest import CheckpointError, step_name
from thinpipe.launch.net.ranks.session import TerminatedError
from thinpipe.launch.run.elastic import ahead
from thinpipe.launch.run.elastic import training as elastic_training
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.pipeline.comm.errors import TransportError

LONG = ("train.epochs=400", "checkpoint.every_steps=4", "checkpoint.keep=99")


def saved_later(folder: str, step: int) -> str:
    """A run folder of this run, in which a step has been saved that the run has not come to.

    What these processes have saved, as in a shared folder, is later still, and does not count.
    """
    own, root = Path(folder) / "elsewhere", Path(folder) / "run/checkpoints"
    saved = max(files.complete(root), key=lambda manifest: manifest.serial)
    for more, run in ((1, saved.run ^ 1), (2, saved.run)):
        target = own / "checkpoints" / step_name(more * step)
        shutil.copytree(root / step_name(saved.step), target)
        later = replace(saved, step=more * step, serial=saved.serial + more, run=run)
        files.write_manifest(target, later)
    return str(own)


def has_gone_on_elsewhere(rank: int, port: int, folder: str) -> str:
    """Rank 2 leaves after step 9; rank 3 comes with a checkpoint of step 1,000."""
    store = TCPStore("127.0.0.1", port, is_master=False)

    def each(training: ElasticTraining, step: int) -> None:
        if rank == 2 and step == 9:
            leave(training)
        if step == 12:
            store.set("comes", "")
        stop_asked(training, store, "rejected")

    changes = [*LONG]
    if rank == 3:
        store.wait(["comes"], timedelta(seconds=PATIENCE_S))
        changes.append(f"run.folder={saved_later(folder, 1000)}")
    try:
        trains(rank, port, folder, *changes, each=each, ends=(), comes=rank == 3)
    except (CheckpointError, TerminatedError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if rank == 3:
            store.set("rejected", "")
    return "trained to the end"


@pytest.mark.slow
@pytest.mark.dist
def test_a_newcomer_with_later_checkpoints_of_the_run_is_rejected_by_name(tmp_path: Path) -> None:
    first, second, _, third = ranks_of(tmp_path, 4, has_gone_on_elsewhere)
    assert first.startswith("TerminatedError"), first
    assert second.startswith("TerminatedError"), second
    assert f"CheckpointError: {tmp_path / 'elsewhere/checkpoints/step-1000'}: the run, now at" in (
        third
    )
    assert "has gone on from an earlier checkpoint, without this machine; move" in third


MEANWHILE = 5


def joins_while_others_train(rank: int, port: int, folder: str, breaks: bool) -> dict[str, Any]:
    """Rank 2 leaves after step 9, and rank 3 comes; all stop when it has made some steps.

    Its state is held back until the others have made some; the connection may break then.
    """
    store, seen = TCPStore("127.0.0.1", port, is_master=False), dict[str, Any](steps=[])
    give, bring_up = ahead.Giver.give, elastic_training.bring_up

    def held_back(giver: Any, send: Any, *rest: Any) -> int:
        first = len(seen["steps"])

        def slowly(tensor: Tensor) -> None:
            until(lambda: len(seen["steps"]) > first + MEANWHILE)
            if breaks and tensor.numel() > 1000:
                raise TransportError("broken")
            send(tensor)

        seen["ahead"] = give(giver, slowly, *rest)
        return int(seen["ahead"])

    def counted(*args: Any, **options: Any) -> int:
        seen["as all waited"] = bring_up(*args, **options)
        return int(seen["as all waited"])

    def finished(taker: ahead.Taker, wait_s: float) -> None:
        finish(taker, wait_s)
        seen["taken"] = taker.steps

    ahead.Giver.give, elastic_training.bring_up = held_back, counted  # type: ignore[method-assign]
    finish, ahead.Taker.finish = ahead.Taker.finish, finished  # type: ignore[method-assign]
    own = [*LONG, "train.verify_every=1"]
    if rank == 3:
        store.wait(["comes"], timedelta(seconds=PATIENCE_S))
        own.append(f"run.folder={folder}/elsewhere")
    each = partial(_after, rank, store, seen)
    trains(rank, port, folder, *own, each=each, comes=rank == 3)
    return seen


def _after(
    rank: int, store: TCPStore, seen: dict[str, Any], training: ElasticTraining, step: int
) -> None:
    seen["steps"].append(step)
    if rank == 2 and step == 9:
        leave(training)
    if step == 12:
        store.set("comes", "")
    if rank == 3 and len(seen["steps"]) == 3:
        store.set("joined", "")
    stop_asked(training, store, "joined")


@pytest.mark.dist
@pytest.mark.parametrize("breaks", mostly_slow([False, True], bool))
def test_a_newcomer_gets_its_state_while_the_others_train(tmp_path: Path, breaks: bool) -> None:
    """What is left to send while all wait is next to nothing; after a failure it is all.

    Digests are compared after each step.
    """
    first, second, _, third = ranks_of(tmp_path, 4, joins_while_others_train, breaks)
    assert first["steps"][-1] == second["steps"][-1] == third["steps"][-1]
    assert len(third["steps"]) >= 3
    assert second["as all waited"] == third["as all waited"] == 0
    if breaks:
        assert third["taken"] == 0
        assert first["as all waited"] > 100_000
    else:
        assert third["taken"] >= MEANWHILE
        assert first["as all waited"] < 0.1 * first["ahead"]
