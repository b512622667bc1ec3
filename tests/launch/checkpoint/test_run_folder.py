"""A run folder is locked by one run at a time, also if two start simultaneously."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thinpipe.launch.checkpoint import run_folder as folder
from thinpipe.launch.checkpoint.run_folder import RunFolder

OURS, OTHER = 0xABC, 0xDEF

HOLD = """
import sys
from pathlib import Path
from thinpipe.launch.checkpoint.run_folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
print(folder._try(int(sys.argv[2]), resume=False), flush=True)
sys.stdin.read()
"""


def acquired(path: Path, *, resume: bool = False, run: int = OURS) -> tuple[RunFolder, str | None]:
    mine = RunFolder(path)
    return mine, mine._try(run, resume=resume)


def taken(path: Path, process: int | None = None) -> str:
    """The error of a second run, naming the first."""
    return (
        f"run.folder = {path}: another run is using it (process {process or os.getpid()} on "
        f"{socket.gethostname()}, run 0000000000000abc); end it, or choose another folder"
    )


def test_a_folder_being_renamed_cannot_be_locked_by_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    earlier, _ = acquired(path)
    (path / "metrics.jsonl").write_text("precious")
    earlier.release()
    move_aside, others = folder._move_aside, []

    def slowly(moved: Path) -> Path:
        monkeypatch.setattr(folder, "_move_aside", move_aside)
        others.extend(acquired(path, resume=resume, run=OTHER)[1] for resume in (False, True))
        return move_aside(moved)

    monkeypatch.setattr(folder, "_move_aside", slowly)
    mine, problem = acquired(path)
    assert problem is None
    assert others == [taken(path)] * 2
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text(encoding="utf-8") == "precious"
    assert not (tmp_path / "run.2").exists()
    mine.release()


@pytest.mark.parametrize("trained", [False, True])
def test_a_start_that_fails_puts_the_earlier_run_back(tmp_path: Path, trained: bool) -> None:
    path = tmp_path / "run"
    earlier, _ = acquired(path)
    (path / "metrics.jsonl").write_text("precious")
    earlier.release()
    mine, _ = acquired(path)
    (path / "memories").mkdir()
    if trained:
        (path / "config.toml").write_text("new")
    mine.put_back()
    mine.release()
    assert folder.earlier_runs(path) == ([tmp_path / "run.1"] if trained else [])
    assert (path / "metrics.jsonl").exists() != trained
    assert (path / "config.toml").exists() == trained


def test_the_lock_of_a_moved_folder_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    lock = folder.disk.lock

    def after_a_move(*arguments: Any) -> bool:
        if path.exists():
            path.rename(tmp_path / "run.1")
        return lock(*arguments)

    monkeypatch.setattr(folder.disk, "lock", after_a_move)
    _, problem = acquired(path)
    assert problem == f"run.folder = {path}: another run is using it"


def test_hosts_of_a_run_share_the_lock_and_a_resumed_run_takes_it_over(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first, problem = acquired(path)
    assert problem is None
    assert acquired(path)[1] is None
    assert acquired(path, run=OTHER)[1] == taken(path)
    first.release()
    again, problem = acquired(path, resume=True)
    assert problem is None
    assert not (tmp_path / "run.1").exists()
    assert acquired(path, resume=True, run=OTHER)[1] == taken(path)
    again.release()


def test_a_second_run_is_rejected_naming_the_owner_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(OURS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "None\n"
        for resume in (False, True):
            assert acquired(path, resume=resume, run=OTHER)[1] == taken(path, holder.pid)
        holder.send_signal(signal.SIGKILL)
    assert (path / ".lock").read_text(encoding="utf-8")  # its name is still there
    mine, problem = acquired(path, resume=True, run=OURS)
    assert problem is None
    assert acquired(path, run=OTHER)[1] == taken(path)
    mine.release()


def test_a_lock_without_an_owner_still_locks(tmp_path: Path) -> None:
    path = tmp_path / "run"
    mine, _ = acquired(path)
    for text in ("", "torn {", "[]"):
        (path / ".lock").write_text(text)
        assert acquired(path)[1] == f"run.folder = {path}: another run is using it"
    mine.release()
