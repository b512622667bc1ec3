"""What a page is told of a run as it goes on."""

import errno
import fcntl
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import append, own_lock, records, trainer, write_run
from thinpipe.launch.view.report.journal import add_note
from thinpipe.launch.view.report.metrics import MetricsWriter
from thinpipe.launch.view.watch.follow import Followed, compared


class Shown:
    """What a page has after the messages that it got; `page.js` does the same."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.parts: dict[str, Any] = {}
        self.sizes: list[int] = []
        self._moment: Any = None

    def update(self, run: Followed) -> dict[str, Any]:
        assert run.moment is not None
        text = run.moment.since(0, self._moment)
        self._moment = run.moment
        self.sizes.append(len(text))
        message: dict[str, Any] = json.loads(text)
        start = message["start"]
        rows = start + len(message["columns"]["step"])
        for name in {*self.columns, *message["columns"]}:
            kept = self.columns.get(name, [])[:start]
            new = message["columns"].get(name, [None] * (rows - start))
            self.columns[name] = [*kept, *[None] * (start - len(kept)), *new]
        self.parts |= message["parts"]
        return message

    def expect(self, run: Followed) -> None:
        assert run.moment is not None
        assert self.columns == run.moment.columns
        assert self.parts == {key: json.loads(part) for key, part in run.moment.parts.items()}


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    steps = records(40)
    run, shown = Followed(write_run(tmp_path / "run", steps[:20])), Shown()
    assert shown.update(run)["start"] == 0
    assert not run.refresh()
    append(run.folder, steps[20:21])
    assert run.refresh()
    message = shown.update(run)
    assert (message["start"], message["columns"]["step"]) == (19, [20, 21])
    assert not {"samples", "details", "timeline"} - {"details"} & message["parts"].keys()
    assert shown.sizes[1] < shown.sizes[0] / 2
    shown.expect(run)


def test_a_line_that_is_not_whole_is_read_when_it_is(tmp_path: Path) -> None:
    steps = records(4)
    run, shown = Followed(write_run(tmp_path / "run", steps[:2])), Shown()
    whole = (run.folder / "metrics.jsonl").read_bytes()
    append(run.folder, steps[2:3])
    line = (run.folder / "metrics.jsonl").read_bytes()[len(whole) :]
    (run.folder / "metrics.jsonl").write_bytes(whole + line[:30])
    run.refresh()
    shown.update(run)
    assert shown.columns["step"] == [1, 2]
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(line[30:])
    run.refresh()
    shown.update(run)
    assert shown.columns["step"] == [1, 2, 3]


def test_a_resume_takes_steps_back(tmp_path: Path) -> None:
    steps = records(30)
    run, shown = Followed(write_run(tmp_path / "run", steps)), Shown()
    shown.update(run)
    with MetricsWriter(run.folder / "metrics.jsonl", 10) as writer:
        writer.write(steps[10])
    assert run.refresh()
    assert shown.update(run)["start"] == 0
    assert shown.columns["step"] == [*range(1, 12)]
    shown.expect(run)


def test_a_long_run_is_thinned_out_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinpipe.launch.view.report.rows.MOST_ROWS", 40)
    steps = records(60)
    run, shown = Followed(write_run(tmp_path / "run", steps[:39])), Shown()
    shown.update(run)
    for until in (40, 41, 60):
        append(run.folder, steps[len(run.story.records if run.story else ()) : until])
        run.refresh()
        shown.update(run)
        shown.expect(run)
    assert shown.columns["step"][:2] == [2, 4]


def test_notes_come_without_a_step(tmp_path: Path) -> None:
    run, shown = Followed(write_run(tmp_path / "run", records(4))), Shown()
    shown.update(run)
    add_note(run.folder, "warning: connection lost", 4)
    assert run.refresh()
    message = shown.update(run)
    assert message["parts"].keys() == {"notes"}
    assert message["parts"]["notes"][-1]["kind"] == "warning"


def test_damage_is_rejected_at_first_and_named_later(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(4))
    run = Followed(folder)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"{}\n")
    append(folder, records(5)[4:])
    run.refresh()
    assert run.story is not None
    assert [record.step for record in run.story.records] == [1, 2, 3, 4, 5]
    assert "1 damaged line" in run.story.notes[-1]["text"]
    with pytest.raises(ValueError, match=r"metrics.jsonl:5: not a step record"):
        Followed(folder)
    with pytest.raises(ValueError, match="it contains the runs run: name one"):
        Followed(tmp_path)


def test_a_run_without_steps_has_nothing_to_show_yet(tmp_path: Path) -> None:
    run = Followed(write_run(tmp_path / "run", []))
    assert (run.moment, run.story) == (None, None)
    append(run.folder, records(2))
    assert run.refresh()
    assert run.moment is not None


def made_old(folder: Path, seconds: float) -> None:
    os.utime(folder / "metrics.jsonl", times=(time.time() - seconds,) * 2)


def state(run: Followed) -> str:
    assert run.moment is not None
    return str(json.loads(run.moment.parts["head"])["state"])


def test_a_killed_run_is_over_and_a_resumed_one_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(20))
    with trainer(folder) as process:
        made_old(folder, 3600)
        run = Followed(folder)
        assert state(run) == "Step 20 of 40."
        assert run.silence == "No step for 1 h 00 min; one usually takes 250 ms."
        assert not run.refresh(), "its process lives"
        process.kill()
        process.wait()
        assert run.refresh()
    gone = "Ended after step 20 of 40: its process is gone, and did not say why."
    assert (state(run), run.silence, run.is_over) == (gone, "", True)
    assert not run.refresh()
    with trainer(folder):
        append(folder, records(40)[20:21])
        assert run.refresh()
        assert (state(run), run.is_over) == ("Step 21 of 40.", False)


def test_a_run_that_was_killed_before_its_first_step_is_a_problem(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    with trainer(folder):
        made_old(folder, 60)
        run = Followed(folder)
        assert not run.refresh()
    assert [run.refresh() for _ in range(3)] == [False, True, False]
    assert run.problem == f"{folder}: the run's process is gone, before its first step"


@pytest.mark.parametrize("case", ["no lock", "no locks", "elsewhere"])
def test_where_nobody_can_say_it_only_the_silence_is_told(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file system has no locks, or of another machine's folder."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    folder = write_run(tmp_path / "run", records(20))
    if case != "no lock":
        own_lock(folder, "elsewhere" if case == "elsewhere" else None)
    if case == "no locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    made_old(folder, 31)
    run = Followed(folder)
    assert (state(run), run.is_over) == ("Step 20 of 40.", False)
    assert re.fullmatch(r"No step for 3\d s; one usually takes 250 ms\.", run.silence)
    made_old(folder, 0)
    assert run.silence == ""


def test_long_steps_are_no_silence(tmp_path: Path) -> None:
    steps = [replace(record, step_s=20.0) for record in records(20)]
    run = Followed(write_run(tmp_path / "run", steps))
    made_old(run.folder, 190)
    assert run.silence == ""
    made_old(run.folder, 210)
    assert run.silence == "No step for 3 min 30 s; one usually takes 20 s."


def test_runs_are_compared_once_all_have_begun(tmp_path: Path) -> None:
    runs = [Followed(write_run(tmp_path / name, records(4), name=name)) for name in ("a", "b")]
    assert compared(runs[:1]) is None
    message = compared(runs)
    assert message is not None
    assert message["names"] == ["a", "b"]
    runs.append(Followed(write_run(tmp_path / "c", [])))
    assert compared(runs) is None


def test_a_state_of_another_version_is_a_problem_until_it_is_none(tmp_path: Path) -> None:
    run = Followed(write_run(tmp_path / "run", records(4)))
    state = (run.folder / "state.json").read_text()
    (run.folder / "state.json").write_text(json.dumps({**json.loads(state), "places": [{}]}))
    assert not run.refresh(), "it may be in the midst of being replaced"
    assert run.refresh()
    assert "state.json: not the state of a run (Place without host" in run.problem
    assert not run.refresh()
    (run.folder / "state.json").write_text(state)
    assert run.refresh()
    assert run.problem == ""
