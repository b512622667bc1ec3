"""A run folder is one run's at a time, also where two start at the same moment."""

from pathlib import Path
from typing import Any

import pytest

from launch import folder
from launch.folder import RunFolder


def claimed(path: Path, *, resume: bool = False, rank: int = 0) -> tuple[RunFolder, str | None]:
    mine = RunFolder(path)
    return mine, mine._try(rank, resume=resume)


def test_a_folder_that_is_being_moved_aside_is_not_another_run_s_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    earlier, _ = claimed(path)
    (path / "metrics.jsonl").write_text("precious")
    earlier.release()
    move_aside, rivals = folder._move_aside, []

    def slowly(moved: Path) -> None:
        monkeypatch.setattr(folder, "_move_aside", move_aside)
        rivals.extend(claimed(path, resume=resume)[1] for resume in (False, True))
        move_aside(moved)

    monkeypatch.setattr(folder, "_move_aside", slowly)
    mine, problem = claimed(path)
    assert problem is None
    assert rivals == [f"run.folder = {path}: another run is using it"] * 2
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == "precious"
    assert not (tmp_path / "run.2").exists()
    mine.release()


def test_a_lock_of_a_folder_that_was_moved_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    flock = folder.fcntl.flock

    def after_a_move(*arguments: Any) -> None:
        if path.exists():
            path.rename(tmp_path / "run.1")
        flock(*arguments)

    monkeypatch.setattr(folder.fcntl, "flock", after_a_move)
    _, problem = claimed(path)
    assert problem == f"run.folder = {path}: another run is using it"


def test_other_hosts_of_the_run_share_the_folder_and_a_resumed_run_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first, problem = claimed(path)
    assert problem is None
    assert claimed(path, rank=1)[1] is None
    assert claimed(path)[1] == f"run.folder = {path}: another run is using it"
    first.release()
    again, problem = claimed(path, resume=True)
    assert problem is None
    assert not (tmp_path / "run.1").exists()
    assert claimed(path, resume=True)[1] == f"run.folder = {path}: another run is using it"
    again.release()
