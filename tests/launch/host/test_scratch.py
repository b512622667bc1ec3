"""Temporary files of launchers that end, and of those that are killed."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from thinpipe.launch.host.scratch import tmpdir_notice

USE = """
import sys, tempfile
from multiprocessing.util import get_temp_dir
from thinpipe.launch.host.scratch import use_scratch_folder
print(use_scratch_folder(), flush=True)
get_temp_dir(), tempfile.mkdtemp()
print(flush=True)
sys.stdin.read()
"""

SWEPT = """
from thinpipe.launch.host import disk, scratch

def swept(file, lock=disk.lock):  # another launcher looks for dead ones just before
    disk.lock = lock
    scratch._sweep(scratch._root())
    return lock(file)

disk.lock = swept
print(scratch.use_scratch_folder().is_dir())
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        yield Path(folder)


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


def test_nothing_stays_of_a_launcher_that_ends_but_folders_without_a_lock(short: Path) -> None:
    (short / "thinpipe-run-other").mkdir()
    with launcher(short) as (process, folder):
        assert folder.parent == short
        assert len([*folder.iterdir()]) == 3  # its lock, multiprocessing's folder, and another
        assert process.communicate() == ("", "")
    assert [path.name for path in short.iterdir()] == ["thinpipe-run-other"]


def test_a_folder_for_temporary_files_that_cannot_be_used_is_told_and_passed_over(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = short / ("d" * 60)
    deep.mkdir()
    for place, told in ((short, False), (deep, True), (short / "none", True)):
        monkeypatch.setenv("TMPDIR", str(place))
        notice = tmpdir_notice()
        assert (notice is not None) == told
        assert not notice or notice.startswith(f"note: TMPDIR = {place}: no folder that can be")
    monkeypatch.delenv("TMPDIR")
    assert tmpdir_notice() is None
    with launcher(deep) as (process, folder):
        assert folder.parent == Path("/tmp")
        process.communicate()
    assert not folder.exists()


def test_what_a_killed_launcher_left_goes_with_the_next_one(short: Path) -> None:
    with launcher(short) as (killed, left):
        with launcher(short) as (other, _):
            assert left.is_dir()  # of a launcher that lives
            other.communicate()
        killed.kill()
        killed.communicate()
        assert left.is_dir()
    with launcher(short) as (process, _):
        assert not left.exists()
        process.communicate()
    assert [*short.iterdir()] == []


def test_one_that_has_no_lock_yet_is_not_taken_for_a_dead_one(short: Path) -> None:
    words, changed = [sys.executable, "-P", "-c", SWEPT], {**os.environ, "TMPDIR": str(short)}
    assert subprocess.check_output(words, env=changed, text=True) == "True\n"
