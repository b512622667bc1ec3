"""What a page is told of a run as it goes on."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.runs import append, records, write_run
from thinpipe.launch.view.report.journal import add_note
from thinpipe.launch.view.report.metrics import MetricsWriter
from thinpipe.launch.view.report.rows import MOST_ROWS
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


def test_a_long_run_is_thinned_out_while_it_goes_on(tmp_path: Path) -> None:
    steps = records(MOST_ROWS + 50)
    run, shown = Followed(write_run(tmp_path / "run", steps[: MOST_ROWS - 1])), Shown()
    shown.update(run)
    for until in (MOST_ROWS, MOST_ROWS + 1, MOST_ROWS + 50):
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


def test_damage_is_refused_at_first_and_named_later(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match="name the folder of a run"):
        Followed(tmp_path)


def test_a_run_without_steps_has_nothing_to_show_yet(tmp_path: Path) -> None:
    run = Followed(write_run(tmp_path / "run", []))
    assert (run.moment, run.story) == (None, None)
    append(run.folder, records(2))
    assert run.refresh()
    assert run.moment is not None
    os.utime(run.folder / "metrics.jsonl", (0, 0))
    assert run.silent_s > 1e9


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
