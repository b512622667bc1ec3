import contextlib
import json
import os
from pathlib import Path

import pytest

from tests.records import run_info, step_record
from tests.waiting import until
from thinpipe.launch.view.report import journal
from thinpipe.launch.view.report.content import Story, content
from thinpipe.launch.view.report.journal import Journal, Place, Told, add_note, read_notes, retell
from thinpipe.launch.view.report.rows import Rows
from thinpipe.launch.view.report.summary import summarize

LINK = {
    "sent_nbytes": 2_500_000, "round_trip_s": 0.05, "retransmitted": 0, "resumed": 0,
    "longest_silence_s": 0.2,
}  # fmt: skip
SAMPLE = ("end_s", "received_Bps", "round_trip_s", "retransmitted", "resumed", "silence_s")
HOSTS = ("one", "two")
PLACE = {"rank": 0, "host": "one", "stages": [0], "replica": 0, "shard": 0}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    info = run_info((6, 12), folder=tmp_path, shards=2)
    with Journal(info, [PLACE]):
        add_note(tmp_path, "resumed from step 4", 4)
        add_note(tmp_path, "warning: a <b>channel</b> is massive", 5)
        add_note(tmp_path, "Once upon\na time", 9, "sample")
    told = Told(tmp_path)
    assert (told.info, told.places, told.edges) == (info, [PLACE], [])
    notes = read_notes(tmp_path)
    assert [note["kind"] for note in notes] == ["note", "warning", "sample"]
    assert (notes[2]["text"], notes[2]["step"]) == ("Once upon\na time", 9)


def test_connections_are_followed_between_steps_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "PERIOD_S", 0.01)
    link = dict(LINK)
    host = {"name": "one", "links": {"two": link}, "trace": []}
    with Journal(run_info((), folder=tmp_path), [], lambda: [host]):
        assert Told(tmp_path).edges[0]["bytes"] == 2_500_000
        link["sent_nbytes"] = 7
        until(lambda: Told(tmp_path).edges[0]["bytes"] == 7)


def test_the_end_of_a_run_is_told_and_why(tmp_path: Path) -> None:
    info, steps = run_info((), folder=tmp_path, total_steps=40), [step_record(3)]
    host = {"name": "one", "links": {"two": LINK}, "trace": []}
    hosts = iter([host, None])

    def state() -> tuple[bool, str, str]:
        told = Told(tmp_path)
        story = Story(info, steps, summarize(info, steps), now=told.now, ended=told.ended)
        head = content(story, Rows(steps))["head"]
        return head["over"], head["left"], head["state"]

    with Journal(info, [], lambda: [next(hosts)]):
        over, left, words = state()
        assert (over, bool(left), words) == (False, True, "Step 3 of 40.")
    assert state() == (True, "", "Ended after step 3 of 40.")
    assert Told(tmp_path).edges[0]["bytes"] == 2_500_000, "kept, though they are gone"
    assert Told(tmp_path).now == []
    for error, why in ((KeyboardInterrupt(), "interrupted"), (OSError("full.\nWell."), "full")):
        with contextlib.suppress(type(error)), Journal(info, []):
            assert not state()[0], "it was resumed"
            raise error
        assert state() == (True, "", f"Ended after step 3 of 40: {why}.")


def test_why_a_run_ended_may_be_learnt_afterwards(tmp_path: Path) -> None:
    run = Journal(run_info((), folder=tmp_path), [PLACE])
    run.write()
    retell(tmp_path, "too early")
    assert Told(tmp_path).ended is None
    run.write(ended="a connection broke")
    retell(tmp_path, "rank 1: killed\nby signal 9")
    assert Told(tmp_path).ended == "rank 1: killed"
    retell(tmp_path / "none", "there is nothing to tell it to")


@pytest.mark.parametrize(
    ("link", "state"),
    [
        ({"connected": True, "silence_s": 0.3}, "up"),
        ({"connected": True, "silence_s": 0.3, "rate_Bps": 2e6}, "up, 16.0 Mbit/s"),
        ({"connected": True, "silence_s": 0.3, "age_s": 17.0}, "no news for 17 s"),
        ({"connected": True, "silence_s": 7.2}, "silent for 7 s"),
        ({"connected": False, "silence_s": 61.0}, "lost for 61 s"),
        ({"connected": False, "silence_s": 9.0, "left": True}, "has left"),
    ],
)
def test_the_state_of_a_connection_is_shown_while_it_is_new(
    link: dict[str, float], state: str, tmp_path: Path
) -> None:
    trace = [{"target": "two", "seconds": 1.0, "sent_Bps": rate, **dict.fromkeys(SAMPLE, 0)}
             for rate in (1.0, link["rate_Bps"])] if "rate_Bps" in link else []  # fmt: skip
    host = {"name": "one", "links": {"two": {**LINK, **link}}, "trace": trace,
            "age_s": link.get("age_s", 0.0)}  # fmt: skip
    info = run_info((), folder=tmp_path)
    Journal(info, [], lambda: [host]).write()
    told = Told(tmp_path)
    assert [*map(tuple, told.now)] == [("one", "two", state)]
    steps = [step_record(1)]
    places = [Place(rank=r, host=h, stages=[r], replica=0, shard=0) for r, h in enumerate(HOSTS)]
    summary = summarize(info, steps, told.edges)
    story = Story(info, steps, summary, now=told.now, places=places)
    table, where = content(story, Rows(steps))["tables"]
    assert (table["heads"][-1], table["rows"][0][-1]) == ("Now", state)
    mark = "" if state.startswith("up") else f" ({state})"
    assert where["rows"] == [["replica 0", "stage 0: one, rank 0", f"stage 1: two, rank 1{mark}"]]
    os.utime(tmp_path / "state.json", (0, 0))
    assert Told(tmp_path).now == []


def test_damaged_files_are_named_or_left_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no state.json, so it is no run's folder"):
        Told(tmp_path)
    with pytest.raises(ValueError, match="no such folder; name that of a run"):
        Told(tmp_path / "none")
    (tmp_path / "state.json").write_text('{"info": 3}')
    with pytest.raises(ValueError, match=r"state.json: not the state of a run"):
        Told(tmp_path)
    Journal(run_info((), folder=tmp_path), [PLACE]).write()
    state = json.loads((tmp_path / "state.json").read_text())
    bad = {"places": [{"rank": 0}], "edges": [{"source": "one"}], "traces": {"one": [{}]},
           "now": [["one"]]}  # fmt: skip
    for name, value in [*bad.items(), *dict.fromkeys(bad, 3).items()]:
        (tmp_path / "state.json").write_text(json.dumps({**state, name: value}))
        with pytest.raises(ValueError, match=r"state.json: not the state of a run"):
            Told(tmp_path)
    line = json.dumps({"at_s": 1.0, "step": 1, "kind": "note", "text": "kept"})
    (tmp_path / "notes.jsonl").write_text(f'{{"half\n[1]\n{{}}\n{line}\n')
    assert [note["text"] for note in read_notes(tmp_path)] == ["kept"]
