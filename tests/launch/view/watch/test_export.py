"""The page as one file, and folders that have no run to show."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.pages import messages_of
from tests.runs import records, write_run
from thinpipe.launch.cli import app
from thinpipe.launch.host import disk
from thinpipe.launch.view.watch.follow import Followed


def run(*words: object) -> str:
    done = CliRunner().invoke(app, ["watch", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: object) -> str:
    done = CliRunner().invoke(app, ["watch", *map(str, words)])
    assert done.exit_code == 2
    return done.output


def test_an_exported_page_holds_what_a_live_one_shows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(20))
    assert run(folder, "--export", tmp_path / "page.html") == f"{tmp_path / 'page.html'}\n"
    (message,) = messages_of(tmp_path / "page.html")
    moment = Followed(folder).moment
    assert moment is not None
    assert message.pop("silence") == ""
    assert message.pop("told_s") == pytest.approx(time.time(), abs=60)
    assert message == json.loads(moment.since(0, None))


def test_several_runs_go_into_one_page(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, records(20), name=name) for name in ("a", "b")]
    run(*folders, "--export", tmp_path / "page.html")
    *_, last = messages_of(tmp_path / "page.html")
    assert last["names"] == ["a", "b"]


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    for options in ([], ["--export", "x.html"]):
        problem = f"{tmp_path}: holds no state.json, so it is no run's folder"
        assert problem in refused(tmp_path, *options)
    for name in ("b", "a"):
        write_run(tmp_path / name, records(2))
    assert f"{tmp_path}: is not a run's folder; it contains the runs a, b: name one" in refused(
        tmp_path
    )
    assert "no such folder; name that of a run" in refused(tmp_path / "c")
    (tmp_path / "a/state.json").unlink()
    assert "an earlier version trained it; run `thinpipe report" in refused(tmp_path / "a")


def test_a_run_that_has_just_been_started_is_waited_for(tmp_path: Path) -> None:
    with (tmp_path / disk.RUN_LOCK).open("w") as lock:
        disk.lock(lock)
        run = Followed(tmp_path)
        assert run.moment is None
        write_run(tmp_path, records(3))
        assert run.refresh()
    assert run.moment is not None


def test_a_run_that_ends_before_it_has_written_anything_is_a_problem(tmp_path: Path) -> None:
    with (tmp_path / disk.RUN_LOCK).open("w") as lock:
        disk.lock(lock)
        run = Followed(tmp_path)
        assert not run.refresh()
    run.refresh()
    run.refresh()
    assert "the run's process is gone, before its first step" in run.problem


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(2))
    assert "open the link in a browser" in refused("http://localhost:1/")
    assert "this machine has no such address; it has" in refused(folder, "--listen", "192.0.2.1:9")
    empty = write_run(tmp_path / "empty", [])
    assert "no step was recorded yet" in refused(empty, "--export", tmp_path / "a.html")


@pytest.mark.parametrize("steps", [1, 40])
def test_a_short_run_can_be_exported(steps: int, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(40)[:steps])
    run(folder, "--export", tmp_path / "a.html")
    assert messages_of(tmp_path / "a.html")[0]["parts"]["head"]["done"] == steps
