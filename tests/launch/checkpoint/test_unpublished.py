"""A first save that was cut short is completed if its parts are there, or begun again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.ranks import run_ranks
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.checkpoint.resume import Resume, common_resume, place_of
from thinpipe.launch.checkpoint.transaction import Save, Transaction
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.session import Session
from thinpipe.pipeline.comm.gloo import GlooTransport

pytestmark = pytest.mark.dist
META = {"config": {"pipeline": {"cuts": [1]}}, "steps_per_epoch": 2}


def _cut_short(rank: int, folder: str, part_is_there: bool) -> Any:
    """All have written their parts; machine 1 was killed before its manifest."""
    transport = GlooTransport(2, 1, timeout_s=120)
    session = Session(HashStore(), transport, 1, 0)
    root = Path(folder) / str(rank)
    place = place_of(session, root)

    def gather(value: Any) -> list[Any]:
        return gather_json(transport, value)

    Transaction(place, Save(2, 1, 1, META, 3), gather, None).run({"w": torch.ones(50)})
    partial = files.partial_folder(root, 2)
    (root / "step-2").rename(partial)
    (root / "latest").unlink()
    if rank == 1:
        (partial / "manifest.json").unlink()
        if not part_is_there:
            (partial / f"{place.part}.safetensors").unlink()
    gather(None)
    asked = Resume(True, required=False)  # as after a restart
    found = common_resume(session, root, asked, None)
    try:
        required = common_resume(session, root, Resume(True), None).wanted
    except CheckpointError as error:
        required = str(error)
    return found.wanted, found.step, required, files.steps(root)


def test_a_part_without_a_manifest_completes_the_step(tmp_path: Path) -> None:
    assert run_ranks(2, _cut_short, str(tmp_path), True) == [(True, 2, True, [2])] * 2


def test_a_restart_begins_anew_if_nothing_was_published(tmp_path: Path) -> None:
    for wanted, step, required, steps in run_ranks(2, _cut_short, str(tmp_path), False):
        assert (wanted, step, steps) == (False, None, [])
        assert "no step is whole" in required  # who asks for it is told
        assert "rank 1" in required
