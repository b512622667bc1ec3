"""Parts that are sent from one machine to another, in one process."""

import hashlib
import os
from pathlib import Path

import pytest

from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.launch.checkpoint.copies import Transfer, run_transfers
from thinpipe.launch.checkpoint.manifest import Part


@pytest.mark.parametrize("nbytes", [1_000, 10_000])
def test_a_disk_that_is_full_is_told_not_raised(tmp_path: Path, nbytes: int) -> None:
    """Of a short rest a file notices that only when it is closed."""
    sent = os.urandom(nbytes)
    part = Part("rank-0", nbytes, hashlib.sha256(sent).hexdigest())
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    part.path(here).write_bytes(sent)
    scratch = there / f".{part.path(there).name}.copy"
    source, target = local_peers(2)
    transfers = [Transfer(part, 0, 1)]

    scratch.symlink_to("/dev/full")
    assert run_transfers(source, here, transfers) == []
    (problem,) = run_transfers(target, there, transfers)
    assert "not written: No space left on device" in problem
    assert not list(there.iterdir())

    run_transfers(source, here, transfers)
    assert run_transfers(target, there, transfers) == []
    assert part.path(there).read_bytes() == sent
    assert [path.name for path in there.iterdir()] == [part.path(there).name]
