"""Connections break while messages are under way, though no rank is lost."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.launch.run.elastic.trained import ranks_of, trains
from thinpipe.launch.net.ranks.gloo_backend import break_connections
from thinpipe.launch.run.elastic.training import ElasticTraining
from thinpipe.launch.run.proof import digest
from thinpipe.launch.view.report.metrics import read_metrics

BROKEN = (5, 17)
"""Steps after which rank 1's connections break, a moment later."""


def breaks_connections(rank: int, port: int, folder: str, method: str) -> dict[int, int]:
    """Digests of what all hold alike, by the steps that are done."""
    changes = [f"gradcomp.method={method}", "train.verify_every=3", "checkpoint.every_steps=4"]
    if method == "sparse_loco":
        changes.append("gradcomp.sparse_loco={interval=3, bucket_mb=0.02}")
    alike = dict[int, int]()

    def each(run: ElasticTraining, step: int) -> None:
        alike[step] = digest(run.built.sync.alike() or [*run.built.stages[0].submod.parameters()])
        if rank == 1 and step in BROKEN:
            ports = run._elastic._hosts.ports
            threading.Timer(0.005 * step, break_connections, [ports]).start()

    trains(rank, port, folder, *changes, each=each)
    return alike


@pytest.mark.dist
@pytest.mark.parametrize("method", ["ef_gradients", "sparse_loco"])
def test_a_run_goes_on_after_its_connections_broke(tmp_path: Path, method: str) -> None:
    first, *others = ranks_of(tmp_path, 3, breaks_connections, method)
    assert all(other == first for other in others)
    records: list[Any] = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [record.step for record in records] == [*range(1, 41)]
    assert {record.samples for record in records} == {6}
    notes = (tmp_path / "run/notes.jsonl").read_text()
    assert "all are there: they have connected anew" in notes
