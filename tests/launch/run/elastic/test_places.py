"""A pipeline loses a machine, and another takes its place."""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.launch.run.elastic.trained import as_rank, stop_asked, train, write_run
from tests.ranks import Ranks
from tests.waiting import PATIENCE_S
from thinpipe.launch.net.ranks.session import TerminatedError
from thinpipe.launch.run.elastic.redoing import RedoingTraining
from thinpipe.launch.view.report.metrics import read_metrics

PIPELINE = (
    "pipeline.replicas=1",
    "pipeline.cuts=[1,2]",
    "pipeline.microbatches=2",
    "model.layers=3",
    "elastic={}",
    "train.verify_every=1",
    "checkpoint.ram_every=4",
    "checkpoint.every_steps=5",
)


def loses_a_stage(rank: int, port: int, folder: str, *changes: str) -> dict[str, Any]:
    """Rank 1 is gone after step 10; rank 3 comes."""
    store, seen = TCPStore("127.0.0.1", port, is_master=False), dict[str, Any](steps=[], losses=[])

    def each(training: Any, step: int) -> None:
        assert isinstance(training, RedoingTraining)
        seen["steps"].append(step)
        if rank == 1 and step == 10:
            store.set("comes", "")
            training._elastic.leave("rank 1 is gone")
            raise SystemExit

    own = [*PIPELINE, *changes, f"network.name=host{rank}"]
    if rank == 3:
        store.wait(["comes"], timedelta(seconds=PATIENCE_S))
        own.append(f"run.folder={folder}/elsewhere")
    with suppress(SystemExit), as_rank(rank, port, folder, *own, comes=rank == 3) as run:
        train(run, each)
        training: Any = run._training
        seen["weights"] = [
            float(p.double().abs().sum()) for s in training.built.stages for p in s.submod.parameters()
        ]
    return seen


@pytest.mark.dist
def test_another_takes_the_place_of_a_stage(ranks: Ranks, tmp_path: Path) -> None:
    write_run(tmp_path, layers=3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, lost, last, other = ranks(4, loses_a_stage, store.port, str(tmp_path))
    assert first["steps"] == last["steps"] == [*range(1, 41)]
    assert lost["steps"] == [*range(1, 11)]
    assert other["steps"] == [*range(11, 41)]
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [record.step for record in records] == [*range(1, 41)]
