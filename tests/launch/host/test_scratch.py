"""Temporary files of launchers that end, and of those that are killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USE = """
import sys, tempfile
from multiprocessing.util import get_temp_dir
from thinpipe.launch.host.scratch import use_scratch_folder
print(use_scratch_folder(), flush=True)
get_temp_dir(), tempfile.mkdtemp()
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def launcher(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    words, changed = [sys.executable, "-P", "-c", USE], {**os.environ, "TMPDIR": str(root)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env=changed, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    with process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        process.stdout.readline()
        yield process, folder


def test_nothing_stays_of_a_launcher_that_ends(tmp_path: Path) -> None:
    with launcher(tmp_path) as (process, folder):
        assert folder.parent == tmp_path
        assert len([*folder.iterdir()]) == 3  # its lock, multiprocessing's folder, and another
        assert process.communicate() == ("", "")
    assert [*tmp_path.iterdir()] == []


def test_what_a_killed_launcher_left_goes_with_the_next_one(tmp_path: Path) -> None:
    with launcher(tmp_path) as (killed, left):
        with launcher(tmp_path) as (other, _):
            assert left.is_dir()  # of a launcher that lives
            other.communicate()
        killed.kill()
        killed.communicate()
        assert left.is_dir()
    with launcher(tmp_path) as (process, _):
        assert not left.exists()
        process.communicate()
    assert [*tmp_path.iterdir()] == []


def test_folders_without_a_lock_stay(tmp_path: Path) -> None:
    (tmp_path / "thinpipe-run-other").mkdir()
    with launcher(tmp_path) as (process, _):
        process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["thinpipe-run-other"]
