import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.pages import parts_of, table_of
from tests.records import run_info, step_record
from thinpipe.launch.host.words import format_bytes
from thinpipe.launch.view.report.content import Story
from thinpipe.launch.view.report.html import page as empty_page
from thinpipe.launch.view.report.html import write_report
from thinpipe.launch.view.report.journal import Note
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.report.summary import summarize
from thinpipe.launch.view.report.timeline import KINDS, timeline_svg
from thinpipe.pipeline.wire.told import ComputeEvent, Direction, WireTotal

TIMELINE = [
    ComputeEvent(0, "F", 0, 0.0, 0.1, 0),
    ComputeEvent(0, "wait", 0, 0.1, 0.4, 0),
    ComputeEvent(0, "B", 0, 0.4, 0.6, 0),
    ComputeEvent(2, "W", 0, 0.6, 0.7, 0),
    ComputeEvent(1, "F", 0, 0.15, 0.25, 1),
    ComputeEvent(1, "encode", 0, 0.7, 0.75, 1),
    ComputeEvent(1, "decode", 0, 0.05, 0.1, 1),
]


def _info(folder: Path, cuts: tuple[int, ...] = (6,), replicas: int = 1) -> RunInfo:
    return run_info(
        cuts, name="<tiny> & slow", folder=folder, replicas=replicas, total_steps=4,
        parameters=1_000_000, exchanged=1_000_000,
    )  # fmt: skip


def _wire(cut: int, direction: Direction, nbytes: int) -> WireTotal:
    return WireTotal(cut=cut, direction=direction, nbytes=nbytes, messages=4, values=1000)


def _records(cuts: tuple[int, ...] = (6,), losses: tuple[float, ...] = ()) -> list[StepRecord]:
    """Four steps in two epochs; step 3 is skipped, step 4 evaluates."""
    records = []
    for step, loss in enumerate(losses or (8.0, 6.0, math.nan, 3.0), start=1):
        first_epoch = step <= 2
        forward, backward = 2000 if first_epoch else 500, 1000
        wire = [_wire(cut, "forward", forward) for cut in cuts]
        wire += [_wire(cut, "backward", backward) for cut in cuts]
        records.append(
            step_record(
                step,
                epoch=1 if first_epoch else 2,
                loss=loss,
                tokens_per_s=100.0 * step,
                step_s=0.5 * step,
                bubble=0.1 * step,
                wire=tuple(wire),
                tokens=64,
                skipped=math.isnan(loss),
                sync_bytes=10,
                control_bytes=3,
                eval={"loss": 2.5, "loss_compressed": 2.625} if step == 4 else None,
                repaired={6: step} if step > 2 else {},
            )
        )
    return records


def _written(
    info: RunInfo, records: list[StepRecord], timeline: Sequence[ComputeEvent] = ()
) -> Path:
    return write_report(Story(info, records, summarize(info, records), timeline))


def test_summary_equals_a_hand_computation(tmp_path: Path) -> None:
    summary = summarize(_info(tmp_path), _records())
    assert (summary["steps"], summary["epochs"], summary["skipped"]) == (4, 2, 1)
    assert (summary["first_loss"], summary["final_loss"]) == (8.0, 3.0)
    assert summary["eval"] == {"loss": 2.5, "loss_compressed": 2.625}
    assert (summary["median_tokens_per_s"], summary["median_step_s"]) == (250.0, 1.25)
    assert summary["mean_bubble"] == pytest.approx(0.25)
    assert (summary["tokens"], summary["wall_s"]) == (256, 5.0)
    assert (summary["sync_bytes"], summary["control_bytes"]) == (40, 12)
    assert summary["repaired"] == {"6": 7}
    forward, backward = summary["wire"]
    assert forward == {
        "cut": 6, "direction": "forward", "method": "aqsgd 4-bit", "bytes": 5000, "messages": 16,
        "bf16_bytes": 8000, "fp32_bytes": 16000, "ratio_bf16": 1.6, "ratio_fp32": 3.2,
        "error": None, "change": None, "cosine": None, "channel_error": None,
        "channel_change": None, "worst_error": None, "worst_channel": None,
        "largest_channel": None, "largest_share": None, "massive_tokens": None, "gain": None,
        "dimensions": None,
    }  # fmt: skip
    assert (backward["bytes"], backward["ratio_bf16"], backward["ratio_fp32"]) == (4000, 2.0, 4.0)
    assert summary["totals"] == {
        "bytes": 9000, "messages": 32, "bf16_bytes": 16000, "fp32_bytes": 32000,
        "ratio_bf16": 16 / 9, "ratio_fp32": 32 / 9,
    }  # fmt: skip


def test_what_is_measured_of_cuts_is_a_mean_over_the_last_epoch(tmp_path: Path) -> None:
    measured = {"error": 0.1, "cosine": 0.9, "gain": 1.25, "dimensions": 7}
    records = [
        replace(r, wire=tuple(replace(w, **measured) if r.step % 2 else w for w in r.wire))
        for r in _records()
    ]
    assert records[0].wire[0].change is None
    info = _info(tmp_path)
    summary = summarize(info, records)
    forward = summary["wire"][0]
    found = forward["error"], forward["cosine"], forward["gain"], forward["dimensions"]
    assert found == tuple(measured.values())
    assert forward["change"] is None
    table = table_of(parts_of(_written(info, records)), "Errors and changes")
    assert "below half a bit" in table["text"]
    assert table["heads"] == [
        *("Cut", "Direction", "Error of all values", "Cosine to the last epoch"),
        *("Coding gain, bits per value", "Dimensions for 95 %"),
    ]
    assert table["rows"][0] == ["6", "forward", "0.1", "0.9", "1.25", "7"]


def test_massive_channels_are_named(tmp_path: Path) -> None:
    """The worst channel of an epoch, and the one that is the largest most often."""
    by_step = {
        3: {"worst_channel": 5, "worst_error": 0.4, "largest_channel": 7, "largest_share": 0.9},
        4: {"worst_channel": 2, "worst_error": 0.8, "largest_channel": 7, "largest_share": 0.8},
    }
    measured = {"error": 0.1, "channel_error": 0.3, "channel_change": 0.2, "massive_tokens": 1}
    records = [
        replace(r, wire=tuple(replace(w, **measured, **by_step.get(r.step, {})) for w in r.wire))
        for r in _records()
    ]
    info = _info(tmp_path)
    summary = summarize(info, records)
    forward = summary["wire"][0]
    assert (forward["worst_channel"], forward["worst_error"]) == (2, 0.8)
    assert (forward["largest_channel"], forward["largest_share"]) == (7, pytest.approx(0.85))
    table = table_of(parts_of(_written(info, records)), "Errors and changes")
    cells = ["0.3", "2: 0.8", "0.1", "0.2", "7: 85% of the energy", "1"]
    assert table["rows"][0] == ["6", "forward", *cells]
    assert "Massive tokens of a sample" in table["text"]


def test_baselines_count_only_steps_that_crossed_the_cut(tmp_path: Path) -> None:
    records = [replace(_records()[0], wire=()), _records()[1]]
    assert summarize(_info(tmp_path), records)["wire"][0]["bf16_bytes"] == 2000


def test_samples_are_of_epochs_whose_steps_all_know_them(tmp_path: Path) -> None:
    known = [(1, None), (1, 8), (2, 8), (2, 6), (3, None)]
    steps = [step_record(n, epoch=e, samples=s) for n, (e, s) in enumerate(known, 1)]
    assert summarize(run_info((), folder=tmp_path), steps)["samples"] == {"2": 14}


def test_a_run_without_steps_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step was recorded"):
        summarize(_info(tmp_path), [])


@pytest.mark.parametrize("cuts", [(), (6,), (6, 12)])
def test_traffic_of_earlier_cuts_is_shown_and_summed(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """Resumed twice: at first cuts 6 and 9, then none, and now `cuts`."""
    first, second, third, fourth = _records(cuts=(6, 9))
    fourth = replace(fourth, wire=tuple(c for c in fourth.wire if c.cut in cuts), repaired={9: 2})
    records = [first, second, replace(third, wire=()), fourth]
    info = _info(tmp_path, cuts)
    summary = summarize(info, records)
    sent = sum(count.nbytes for record in records for count in record.wire)
    assert summary["totals"]["bytes"] == sent == sum(row["bytes"] for row in summary["wire"])
    earlier = {row["cut"] for row in summary["wire"] if row["method"] == "earlier cut"}
    assert earlier == {6, 9} - set(cuts)
    assert summary["repaired"] == {"6": 3, "9": 2}
    table = table_of(parts_of(_written(info, records)), "Traffic of the whole run")
    assert ["9", "forward", "earlier cut"] in [row[:3] for row in table["rows"]]


def test_bytes_between_shards_are_shown_where_there_are_shards(tmp_path: Path) -> None:
    info = replace(_info(tmp_path), shards=2)
    records = [replace(r, weight_bytes=1000 * r.step, gradient_bytes=7) for r in _records()]
    summary = summarize(info, records)
    assert summary["weight_bytes"] == sum(record.weight_bytes for record in records)
    details = dict(parts_of(_written(info, records))["details"])
    assert details["Weights between shards"] == "10.0 kB (10,000 bytes)"
    assert details["Gradients between shards"] == "28 bytes"


def test_page_loads_nothing_from_elsewhere_and_shows_the_summary(tmp_path: Path) -> None:
    info, records = replace(_info(tmp_path), folder=tmp_path / "new"), _records()
    summary = summarize(info, records)
    page = _written(info, records, TIMELINE)
    html = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["'](?!data:|#)|@import|url\((?!#)""", html)
    parts = parts_of(page)
    table = table_of(parts, "Traffic of the whole run")
    exact = [
        cell for row in (*table["rows"], table["total"]) for cell in row if isinstance(cell, list)
    ]
    assert exact == [
        [format_bytes(row[key]), f"{row[key]:,} bytes"]
        for row in (*summary["wire"], summary["totals"])
        for key in ("bytes", "bf16_bytes", "fp32_bytes")
    ]
    assert dict(parts["cards"]) | dict(parts["details"]) == {
        "Training loss, last epoch": "3.0000", "Evaluation loss": "2.5000",
        "Evaluation loss, compressed": "2.6250", "Tokens per second, median": "250",
        "Bubble, mean": "25.0 %", "Sent over the cuts": "9.00 kB",
        "Compression ratio to bf16": "1.8\u00d7", "Time in steps": "5 s", "Steps": "4",
        "Skipped steps": "1", "Tokens": "256", "Step time, median": "1.25 s",
        "Loss of the first step": "8.0000", "Activations": "5.00 kB (5,000 bytes)",
        "Activation gradients": "4.00 kB (4,000 bytes)", "Sent between replicas": "40 bytes",
        "Control messages": "12 bytes", "Ratio to fp32 all-reduce": "-",
        "Cached activations reset": "7 samples at cut 6", "Machine": "2 cores",
        "Versions": "torch 2.13.0", "Configuration digest": "abc123",
    }  # fmt: skip
    assert (parts["head"]["state"], parts["head"]["name"]) == ("", "<tiny> & slow")
    stored = (tmp_path / "new" / "summary.json").read_text(encoding="utf-8")
    assert json.loads(stored) == summary


def test_text_of_others_cannot_leave_the_data_of_a_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!-- \u2028 &amp;"
    info = replace(_info(tmp_path), name=evil, machine=evil)
    note = Note(at_s=0.0, step=1, kind="sample", text=evil)
    story = Story(info, _records(), summarize(info, _records()), notes=[note])
    page = write_report(story)
    html = page.read_text(encoding="utf-8")
    assert "alert(1)</script>" not in html
    assert html.count("<script") == 4  # the data, the charts' library, and two of ours
    assert parts_of(page)["samples"][0]["text"] == evil


def test_only_the_page_s_own_scripts_may_run(tmp_path: Path) -> None:
    html = _written(_info(tmp_path), _records()).read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert "unsafe" not in policy[1]
    assert policy[1].startswith("default-src 'none'")
    blocks = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", html, re.DOTALL)
    for block in blocks:
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert len(blocks) == 4


def test_the_page_is_small() -> None:
    assert len(empty_page("", None).encode()) < 100_000


def test_errors_have_a_picture_where_they_were_measured(tmp_path: Path) -> None:
    info, pictures = _info(tmp_path), []
    names = ("error", "channel_error", "channel_change")
    for error in (None, 0.1):
        records = [
            replace(
                record, wire=tuple(replace(w, **dict.fromkeys(names, error)) for w in record.wire)
            )
            for record in _records()
        ]
        charts = parts_of(_written(info, records))["charts"]
        pictures.append([len(c["lines"]) for c in charts if c["place"] == "error"])
    assert pictures == [[], [3]]


@pytest.mark.parametrize("losses", [(2.0,), (math.nan, math.nan, math.inf)])
@pytest.mark.parametrize("cuts", [(), (2, 4)])
def test_short_and_broken_runs_still_get_a_report(
    tmp_path: Path, cuts: tuple[int, ...], losses: tuple[float, ...]
) -> None:
    info, records = _info(tmp_path, cuts, replicas=2), _records(cuts, losses)
    summary = summarize(info, records)
    parts = parts_of(write_report(Story(info, records, summary)))
    assert parts["timeline"] is None
    assert any(table["place"] == "bytes" for table in parts["tables"]) == bool(cuts)
    json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_timeline_shows_every_kind_in_its_own_colour_and_to_scale() -> None:
    boxes = re.findall(r'<rect class="(\w+)" x="([\d.]+)"[^/]*? width="([\d.]+)"[^/]*/>', svg())
    assert {kind for kind, *_ in boxes} == {*KINDS}
    assert len({colour for _, colour in KINDS.values()}) == len(KINDS)
    (_, wait), (_, start, forward) = (
        next((x, w) for kind, x, w in boxes if kind == "wait"),
        next(box for box in boxes if box[0] == "F"),
    )
    assert float(wait) == pytest.approx(3 * float(forward), abs=0.2)
    idle = next(float(x) for kind, x, _ in boxes if kind == "idle")
    assert float(start) == pytest.approx(idle, abs=0.1)


def svg() -> str:
    return timeline_svg(TIMELINE)


def test_timeline_says_whose_rows_they_are_and_pales_later_stages() -> None:
    assert "rank 0, stages 0, 2<" in svg()
    assert "rank 1, stage 1<" in svg()
    assert svg().count("47% idle") == 1  # of rank 0: 0.4 of 0.75 s
    assert len(re.findall(r'class="W"[^/]*opacity: 0.65', svg())) == 1
