import json
from pathlib import Path

import pytest

from thinpipe.launch.plan.trace import processes, trace_run
from thinpipe.launch.view.report.timeline import Timeline, read_timeline
from thinpipe.pipeline.wire.told import ComputeEvent

EVENTS = tuple(
    ComputeEvent(rank, "F", m, rank + m, rank + m + 1, rank) for rank in range(3) for m in range(2)
)
MEASURED = Timeline(
    step=7,
    schedule="GPipe",
    depth=1,
    microbatches=2,
    accumulate=1,
    pipeline_ranks=3,
    replicas=1,
    cuts=(4, 8),
    wire=(),
    events=EVENTS,
)


def test_a_trace_shows_a_step_rank_by_rank(tmp_path: Path) -> None:
    MEASURED.write(tmp_path)
    assert read_timeline(tmp_path) == MEASURED
    summary = trace_run(tmp_path, tmp_path / "trace.json")
    assert "step 7, measured" in summary
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank} (stage {rank})" for rank in range(3)}
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["cat"] == "F"]
    assert [(e["ts"], e["dur"]) for e in spans] == [(0, 1e6), (1e6, 1e6)]


def test_concurrent_codecs_are_drawn_on_separate_tracks() -> None:
    at = [("F", 0.0, 4.0), ("encode", 1.0, 3.0), ("decode", 2.0, 5.0), ("encode", 3.0, 4.0)]
    drawn = processes(ComputeEvent(0, kind, 0, *span) for kind, *span in at)  # type: ignore[arg-type]
    spans = [(e["cat"], e["ts"] / 1e6, e["tid"]) for e in drawn if e["ph"] == "X"]
    assert spans == [("F", 0, 0), ("encode", 1, 2), ("decode", 2, 3), ("encode", 3, 2)]
    names = {e["tid"]: e["args"]["name"] for e in drawn if e["name"] == "thread_name"}
    assert names == {0: "compute", 2: "codec", 3: "codec"}


def test_a_run_without_a_timeline_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run.toml: no such folder; give that of a finished run"):
        read_timeline(tmp_path / "run.toml")
    with pytest.raises(ValueError, match="no timeline"):
        read_timeline(tmp_path)
    (tmp_path / "timeline.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match="not a timeline"):
        read_timeline(tmp_path)


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    MEASURED.write(tmp_path)
    with pytest.raises(ValueError, match=r"--out = .*gone/trace\.json: cannot be written: No such"):
        trace_run(tmp_path, tmp_path / "gone" / "trace.json")
