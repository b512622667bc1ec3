"""Steps that are kept, crashes while finishing, and hosts that share a file system."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.launch.checkpoint.steps import STAGES, save, truncate
from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.checkpoint.files import begin, read_part, write_part
from thinpipe.launch.checkpoint.manifest import Manifest, Part


def test_settling_keeps_the_newest_of_those_saved_before(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step)
    begin(tmp_path, 15)
    begin(tmp_path, 60)
    checkpoint.settle(tmp_path, 40, keep=2)
    assert checkpoint.steps(tmp_path) == [30, 40, 50]  # 50 was saved later: nobody said it is whole
    assert checkpoint.pointer(tmp_path) == "step-40"
    assert not (tmp_path / ".step-15.partial").exists()
    assert (tmp_path / ".step-60.partial").is_dir(), "a newer save may be under way"


def test_a_damaged_step_never_counts_among_those_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    truncate(tmp_path / "step-30" / f"{STAGES[0]}.safetensors")
    checkpoint.settle(tmp_path, 40, keep=2)
    assert checkpoint.steps(tmp_path) == [20, 40]
    assert (tmp_path / "step-30").is_dir()


CRASH = """
import os, sys, torch
from pathlib import Path
from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.checkpoint.manifest import Manifest
folder = checkpoint.begin(Path(sys.argv[1]), 50)
part = checkpoint.write_part(folder, "stage-0.replica-0", {"w": torch.ones(64)})
real, left = os.replace, int(sys.argv[2])
def replace(source, target):
    global left
    if left == 0:
        os._exit(9)
    left -= 1
    real(source, target)
os.replace = replace
manifest = Manifest(50, 7, 50, {}, (part,))
checkpoint.prepare(Path(sys.argv[1]), manifest)
checkpoint.publish(Path(sys.argv[1]), manifest)
checkpoint.settle(Path(sys.argv[1]), 50, keep=9)
"""


@pytest.mark.parametrize(
    ("moves", "prepared"),
    [
        pytest.param(0, False, marks=pytest.mark.slow),
        (1, True),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_a_crash_while_finishing_leaves_the_older_step_and_the_next_save_works(
    tmp_path: Path, moves: int, prepared: bool
) -> None:
    save(tmp_path, 40)
    command = [sys.executable, "-c", CRASH, str(tmp_path), str(moves)]
    assert subprocess.run(command, check=False, timeout=120).returncode == 9

    assert checkpoint.newest(tmp_path) == 40
    assert checkpoint.steps(tmp_path) == [40]
    assert read_part(tmp_path / "step-40", STAGES[0])["step"] == 40
    offered = {offer.step: offer.prepared for offer in checkpoint.offers(tmp_path)}
    assert offered == ({40: False, 50: True} if prepared else {40: False})
    save(tmp_path, 50)
    assert checkpoint.newest(tmp_path) == 50
    assert len(checkpoint.read_manifest(tmp_path / "step-50").parts) == 2


def test_hosts_on_one_file_system_may_all_begin_and_finish(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)
    errors: list[Exception] = []
    shared: dict[int, Part] = {}

    def host(rank: int) -> None:
        try:
            for save in range(8):
                barrier.wait(timeout=60)
                folder = begin(tmp_path, save // 2)  # every step twice: made, then replaced
                barrier.wait(timeout=60)
                shared[rank] = write_part(folder, f"rank-{rank}", {"rank": rank, "save": save})
                barrier.wait(timeout=60)
                parts = tuple(shared[other] for other in sorted(shared))
                manifest = Manifest(save // 2, 7, save + 1, {}, parts)
                for phase in (checkpoint.prepare, checkpoint.publish):
                    phase(tmp_path, manifest)
                    barrier.wait(timeout=60)
                checkpoint.settle(tmp_path, manifest.step, keep=9)
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=host, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == []
    assert checkpoint.steps(tmp_path) == [0, 1, 2, 3]
    assert checkpoint.newest(tmp_path) == 3
    assert read_part(tmp_path / "step-3", "rank-2") == {"rank": 2, "save": 7}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
