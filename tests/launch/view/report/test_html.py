import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.records import run_info, step_record
from thinpipe.launch.host.words import format_bytes
from thinpipe.launch.view.report.html import write_report
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.report.summary import summarize
from thinpipe.launch.view.report.timeline_chart import KINDS, timeline_svg
from thinpipe.pipeline.stage import ComputeEvent
from thinpipe.pipeline.step_stats import WireTotal
from thinpipe.pipeline.wire.header import DIRECTIONS, Direction

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


class _Page(HTMLParser):
    """Collects what the tests ask about, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.values: list[int] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [given[name] or "" for name in ("src", "srcset", "href") if name in given]
        if tag == "data":
            self.values.append(int(given["value"] or ""))
        assert tag not in ("link", "iframe")
        if tag not in ("meta", "img", "source"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Marks and lines of a chart."""

    def handle_data(self, data: str) -> None:
        self.text.append(data)


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
    page = write_report(tmp_path, info, records=records, timeline=(), summary=summary).read_text(
        encoding="utf-8"
    )
    assert "Worst channel" not in page
    assert "Coding gain, bits per value" in page
    assert '<td class="n">1.25</td>' in page
    assert '<th class="n">Change</th>' not in page


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
    page = write_report(tmp_path, info, records=records, timeline=(), summary=summary).read_text(
        encoding="utf-8"
    )
    cells = ("0.3", "2: 0.8", "0.1", "0.2", "7: 85% of the energy", "1")
    row = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    assert f"<td>6</td><td>forward</td>{row}" in page
    assert "Massive tokens of a sample" in page


def test_baselines_count_only_steps_that_crossed_the_cut(tmp_path: Path) -> None:
    records = [replace(_records()[0], wire=()), _records()[1]]
    assert summarize(_info(tmp_path), records)["wire"][0]["bf16_bytes"] == 2000


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
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
    page = write_report(tmp_path, info, records=records, timeline=[], summary=summary)
    text = "".join(_Page(page.read_text(encoding="utf-8")).text)
    assert "9forwardearlier cut" in text


def test_bytes_between_shards_are_shown_where_there_are_shards(tmp_path: Path) -> None:
    info = replace(_info(tmp_path), shards=2)
    records = [replace(r, weight_bytes=1000 * r.step, gradient_bytes=7) for r in _records()]
    summary = summarize(info, records)
    assert summary["weight_bytes"] == sum(record.weight_bytes for record in records)
    html = write_report(tmp_path, info, records=records, timeline=(), summary=summary)
    values = _Page(html.read_text(encoding="utf-8")).values
    assert {summary["weight_bytes"], summary["gradient_bytes"]} <= set(values)


def test_page_loads_nothing_from_elsewhere_and_shows_the_summary(tmp_path: Path) -> None:
    info, records = _info(tmp_path), _records()
    summary = summarize(info, records)
    html = write_report(
        tmp_path / "new", info, records=records, timeline=TIMELINE, summary=summary
    ).read_text(encoding="utf-8")
    page = _Page(html)
    text = "".join(page.text)
    assert page.links == []
    assert not re.search(r"https?://|@import|url\((?!#)", html)
    rows = [*summary["wire"], summary["totals"]]
    exact = [row[key] for row in rows for key in ("bytes", "bf16_bytes", "fp32_bytes")]
    ways = [sum(r["bytes"] for r in summary["wire"] if r["direction"] == d) for d in DIRECTIONS]
    classes = [*ways, summary["sync_bytes"], summary["control_bytes"]]
    assert page.values == [*exact, *classes]
    shown = [
        "<tiny> & slow",
        "7 samples at cut 6",
        "3.0000",
        "2.5000",
        "2.6250",
        "250",
        "25.0 %",
        "abc123",
        "torch 2.13.0",
    ]
    shown += [format_bytes(nbytes) for nbytes in exact]
    assert [item for item in shown if item not in text] == []
    assert json.loads((tmp_path / "new" / "summary.json").read_text(encoding="utf-8")) == summary


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
        page = _Page(
            write_report(
                tmp_path, info, records=records, timeline=[], summary=summarize(info, records)
            ).read_text(encoding="utf-8")
        )
        text = "".join(page.text)
        assert ("Compression error" in text) == (error is not None)
        pictures.append(text.count("change since the last epoch"))
    assert pictures == [0, 1]


@pytest.mark.parametrize("losses", [(2.0,), (math.nan, math.nan, math.inf)])
@pytest.mark.parametrize("cuts", [(), (2, 4)])
def test_short_and_broken_runs_still_get_a_report(
    tmp_path: Path, cuts: tuple[int, ...], losses: tuple[float, ...]
) -> None:
    info, records = _info(tmp_path, cuts, replicas=2), _records(cuts, losses)
    summary = summarize(info, records)
    page = write_report(tmp_path, info, records=records, timeline=[], summary=summary)
    text = "".join(_Page(page.read_text(encoding="utf-8")).text)
    assert "No timeline was recorded" in text
    assert ("so there are no cuts" in text) == (not cuts)
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


def test_a_timeline_without_events_is_refused() -> None:
    with pytest.raises(ValueError, match="no events"):
        timeline_svg([])
