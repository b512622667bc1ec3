"""`thinpipe report`, and reports of runs that are not over."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.invoking import printed
from tests.pages import messages_of, parts_of, table_of
from tests.records import step_record
from tests.training import config
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.host import disk
from thinpipe.launch.run.records import Records, describe_run
from thinpipe.launch.run.report import add_samples
from thinpipe.launch.view.report.metrics import MetricsWriter
from thinpipe.launch.view.terminal.display import Display

RECORD = step_record(1, loss=3.0)


LINK = {
    "sent_nbytes": 2_500_000, "round_trip_s": 0.05, "retransmitted": 0, "resumed": 0,
    "longest_silence_s": 0.2,
}  # fmt: skip
SAMPLE = {
    "target": "two", "end_s": 1.0, "seconds": 1.0, "sent_Bps": 2.5e6, "received_Bps": 0.0,
    "round_trip_s": 0.05, "retransmitted": 0, "resumed": 0, "silence_s": 0.0,
}  # fmt: skip
HOST = {"name": "one", "links": {"two": LINK}, "trace": [SAMPLE]}


def run_in(folder: Path, losses: list[float]) -> RunConfig:
    run = config(run={"folder": str(folder), "name": folder.name}, train={"epochs": 2})
    folder.mkdir()
    write_config(run, folder / "config.toml")
    with MetricsWriter(folder / "metrics.jsonl", None) as writer:
        for step, loss in enumerate(losses, 1):
            writer.write(replace(RECORD, step=step, loss=loss))
    return run


def test_the_report_of_a_run_under_way_is_written_from_its_folder(tmp_path: Path) -> None:
    run_in(tmp_path / "one", [3.0, 2.5, 2.0])
    printed("report", tmp_path / "one")
    (message,) = messages_of(tmp_path / "one" / "report.html")
    assert message["parts"]["head"]["state"] == "Step 3 of 6."
    assert message["columns"]["loss"] == [3.0, 2.5, 2.0]


def test_several_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    for name, losses in (("one", [3.0, 2.0]), ("two", [3.0, 1.0, 0.5])):
        run_in(tmp_path / name, losses)
    out = tmp_path / "both.html"
    printed("report", tmp_path / "one", tmp_path / "two", "--out", out)
    *_, last = messages_of(out)
    assert last["names"] == ["one", "two"]
    assert ["Training loss, last epoch", "2.5000", "1.5000"] in last["table"]["rows"]
    assert not (tmp_path / "one" / "report.html").exists()


def test_samples_come_to_the_report(tmp_path: Path) -> None:
    run_in(tmp_path / "one", [3.0, 2.0])
    add_samples(tmp_path / "one", ["Once upon"])
    (sample,) = parts_of(tmp_path / "one" / "report.html")["samples"]
    assert (sample["text"], sample["step"]) == ("Once upon", 2)


@pytest.mark.parametrize("damage", ["report", "metrics", "nothing"])
def test_a_run_that_was_trained_does_not_fail_for_its_samples(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_said", set())
    folder = tmp_path / "one"
    run_in(folder, [] if damage == "nothing" else [3.0])
    if damage == "report":
        (folder / ".report.html.partial").mkdir()
    if damage == "metrics":
        (folder / "metrics.jsonl").write_text("{}\n")
    add_samples(folder, ["Once upon"])
    (said,) = caplog.messages
    assert said.startswith(f"warning: {folder}/report.html lacks the samples: ")
    causes = {"report": "directory", "metrics": "metrics.jsonl:1", "nothing": "no step"}
    assert causes[damage] in said


def test_older_runs_in_folders_that_cannot_be_written_are_compared(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        run_in(folder, [3.0, 2.0])
        (folder / ".state.json.partial").mkdir()  # root may write anywhere else
    printed("report", *folders, "--out", tmp_path / "a.html")
    assert not any((folder / "state.json").exists() for folder in folders)
    *_, last = messages_of(tmp_path / "a.html")
    assert ["Steps done", "2 of 4", "2 of 4"] in last["table"]["rows"]


@pytest.mark.parametrize(("folder", "problem"), [("", "no config.toml"), ("one", "no step was")])
def test_what_is_no_run_or_has_no_step_is_named(folder: str, problem: str, tmp_path: Path) -> None:
    run_in(tmp_path / "one", [])
    assert problem in printed("report", tmp_path / folder, code=2)


def test_a_report_is_there_after_every_evaluation_and_when_a_run_ends_early(tmp_path: Path) -> None:
    run = config(run={"folder": str(tmp_path)})
    info = describe_run(run, 10)
    page = tmp_path / "report.html"
    how: dict[str, Any] = {"links": lambda: [HOST], "hosts": ["left", "right"]}
    records = Records(run, info, Display(None), writes=True, **how)

    def connections() -> list[list[str]]:
        table = table_of(parts_of(page), "Connections between machines")
        return [row[:2] for row in table["rows"]]

    with ExitStack() as stack:
        records.open(stack, None)
        records.add(RECORD)
        assert not page.exists()
        records.evaluated({"loss": 2.75})
        assert "Step 1 of 10" in page.read_text(encoding="utf-8")
        assert ["Evaluation loss", "2.7500"] in parts_of(page)["cards"]
        assert connections() == [["one", "two"]]
        records.add(replace(RECORD, step=2, loss=2.0, notes=("cut 2 is odd",)))
    assert "Step 2 of 10" in page.read_text(encoding="utf-8")
    assert table_of(parts_of(page), "Where ranks run")["rows"] == [
        ["replica 0", "stage 0: left, rank 0", "stage 1: right, rank 1"]
    ]
    assert parts_of(page)["notes"][0]["text"] == "warning: cut 2 is odd"
    page.unlink()
    printed("report", tmp_path)
    assert connections() == [["one", "two"]], "they are kept"
