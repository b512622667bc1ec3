"""Runs on full and odd disks, which are made with tmpfs: what is said, when, and what is saved."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.commands import run
from tests.disk import full_disk
from tests.launch.test_train import run_file
from thinpipe.launch.checkpoint import files
from thinpipe.launch.config.run import load_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.memory.space import check_space

__all__ = ["run_file"]

pytestmark = pytest.mark.dist

Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """`mount("size=1m")` is a folder on a disk of its own."""
    place = tmp_path / "disk"
    mounted = []

    def make(options: str) -> Path:
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield make
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def rejected(run_file: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("train", run_file, "--set", f"run.folder={folder}", *arguments, code=2)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_checkpoint_that_cannot_fit_is_rejected_before_the_first_step(
    run_file: Path, mount: Mount, dry: tuple[str, ...]
) -> None:
    place = mount("size=200k")
    done = rejected(run_file, place / "run", *dry)
    assert "step  1" not in done.stdout
    assert f"run.folder = {place / 'run'}: a checkpoint takes " in done.stderr
    assert "205 kB free; free disk space, or name a folder on a larger disk" in done.stderr


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_the_steps_that_do_not_fit(run_file: Path, mount: Mount) -> None:
    place = mount("size=1300k")
    done = rejected(run_file, place / "run", "--set", "train.decay=none")
    assert "note: checkpoint.keep = 9: those still to come" in done.stdout
    assert files.steps(place / "run" / "checkpoints") == [4, 8]
    *_, before, last = done.stderr.splitlines()
    assert "step 12 was not saved: " in before
    assert "training continues" in before
    assert "step 15, the last one, could not be saved: " in last
    assert "No space left on device; free disk space; step 8 is saved; then train again" in last
    assert last.endswith("with --resume")


@pytest.mark.slow
def test_where_nothing_was_saved_there_is_nothing_to_resume(run_file: Path, mount: Mount) -> None:
    place = mount("size=410k")
    seldom = ["--set", "checkpoint.every_steps=99", "--set", "train.decay=none"]
    done = rejected(run_file, place / "run", *seldom)
    assert "retried" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.endswith("free disk space; nothing is saved yet; then train again"), last


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("ro", "name a folder that is not mounted read-only"),
        ("nr_inodes=1", "no inodes left; remove files, however small"),
    ],
)
def test_a_folder_that_takes_no_files_is_rejected_before_the_start(
    run_file: Path, mount: Mount, options: str, words: str
) -> None:
    place = mount(options)
    assert words in rejected(run_file, place / "run", "--dry-run").stderr


def test_a_file_size_limit_below_a_part_is_rejected(run_file: Path) -> None:
    config = load_config(run_file, [])
    with full_disk(2**20):
        check_space(config.run.path, [2**20, 5])
        with pytest.raises(ConfigError, match=r"`ulimit -f` allows files of 1\.05 MB, but a rank"):
            check_space(config.run.path, [2**20 + 1, 5])


@pytest.mark.slow
def test_any_name_of_a_folder_will_do(
    run_file: Path, tmp_path: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to another disk, spaces, letters of any language, a new line, 250 bytes."""
    (tmp_path / "runs").symlink_to(mount("size=20m"))
    name = "Zwölf läufe\n" + "é" * 118
    text = run_file.read_text(encoding="utf-8").replace(
        str(tmp_path / "run"), f"runs/{json.dumps(name)[1:-1]}"
    )
    run_file.write_text(text)
    monkeypatch.chdir(tmp_path)
    run("train", run_file, "--set", "train.epochs=1")
    assert files.steps(tmp_path / "disk" / name / "checkpoints") == [4, 5]
