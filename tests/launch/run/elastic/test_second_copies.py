"""Machines that keep second copies of what others save, in a run that goes on without one."""

from pathlib import Path

import pytest

from tests.launch.run.elastic.trained import leave, ranks_of, trains
from tests.waiting import until
from thinpipe.launch.checkpoint import files
from thinpipe.launch.run.elastic.training import ElasticTraining

SAVED, LOST = 4, 10


def saves_two_copies(rank: int, port: int, folder: str) -> list[int]:
    """Every rank is a machine of its own. Rank 2 is lost after step 10: the steps saved here."""
    own = Path(folder) / str(rank)
    changes = ["checkpoint.copies=2", f"checkpoint.every_steps={SAVED}", f"run.folder={own}"]
    changes.append("train.max_steps=24")

    def each(run: ElasticTraining, step: int) -> None:
        if step in (SAVED + 1, 2 * SAVED + 1):  # what is begun ends before the next one
            until(lambda: files.newest(own / "checkpoints") == step - 1)
        if rank == 2 and step == LOST:
            leave(run)

    trains(rank, port, folder, *changes, each=each, apart=True)
    return files.steps(own / "checkpoints")


@pytest.mark.dist
def test_they_are_made_before_and_after_a_loss(tmp_path: Path) -> None:
    first, second, lost = ranks_of(tmp_path, 3, saves_two_copies)
    assert {SAVED, 2 * SAVED} <= {*lost}
    assert first == second
    assert 24 in first
    for step, count in ((SAVED, 3), (24, 2)):
        for rank in range(count):
            parts = {path.name for path in (tmp_path / f"{rank}/checkpoints/step-{step}").iterdir()}
            held = [name for name in parts if name.endswith(".safetensors")]
            assert len(held) == 2, (step, rank, parts)
