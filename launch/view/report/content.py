"""What a page shows of one run, as JSON values: numbers in words, tables, and what charts draw.

`page/page.js` renders it, always as text. Tables hold cells, or [cell, title] pairs; a line of a
chart names the column of `Rows` that it draws.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from thinpipe.launch.host.words import NOTHING, format_bytes, format_duration
from thinpipe.launch.view.report.edges import Traces, edge_cells
from thinpipe.launch.view.report.journal import UP, Note, Place
from thinpipe.launch.view.report.metric_table import (
    LOSSES,
    SHARDS,
    SPEED,
    TRAFFIC,
    label,
    other_scores,
    shown,
)
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.report.rows import Rows
from thinpipe.launch.view.report.summary import Summary, Traffic, WireTraffic, traffic_cells
from thinpipe.launch.view.report.timeline import timeline_svg
from thinpipe.pipeline.wire.told import MASSIVE, ComputeEvent

Json: TypeAlias = dict[str, Any]
_LATELY = 50  # steps whose median time tells how long the rest takes
_SILENT_S, _SILENT_STEPS = 30.0, 10
"""Without a step for so long, and for as long as so many take, something may be wrong."""

_LOSS = """Cross-entropy of the next token, or of a sample's label; lower is better. Dots are
evaluations on held-out text with uncompressed boundaries; open diamonds are the same evaluation
with compressed boundaries, where every sample is in its first epoch. Where the two coincide, this
compression does not change the model's predictions."""
_BYTES = """At a cut, a stage sends activations to the next one (forward) and receives their
gradients (backward); a cut is named by the first layer after it. Dotted lines are the same values
as bf16 or fp32. The scale is logarithmic, so equal distances are equal ratios."""
_AQSGD = """ AQ-SGD sends a sample's activations in the first epoch, and then only their change
since the previous epoch: the curve falls after the first."""
_ERROR = """Measured at the sender on one sample per step: the error of each channel, and its
change since the previous epoch of the sample, relative to the channel's own size. Shown is the
median channel. Changes that grow are a bad sign."""
_MEASURED = f"""Means over the last epoch. Massive tokens of a sample have over {MASSIVE:.0f} times
the energy of its median token. Channels are measured without them, all values with them."""
_GAIN = "Coding gain, bits per value"
_GAIN_TEXT = """ The coding gain is what a learned basis saves at the same step, against one
distribution for all values; below half a bit, it is not used."""
_TIMELINE = """One row per rank, time to the right; the number in a box is the microbatch. Empty
and hatched parts are the bubble: the rank was idle or waited for a message. More microbatches, a
better schedule or smaller messages reduce it. If a rank has several stages, later ones are
paler."""
_EDGES = """What left each machine for another, with all that encryption, framing and repetition
add, and with evaluations, whose activations are not compressed. A diamond marks a connection that
broke and was resumed: nothing was lost. Long silences, and segments that TCP had to send again, are
signs of a bad or overloaded network. During a run, other machines tell rank 0's every 5 s."""
_DARK = (
    "<style>@media (prefers-color-scheme: dark) { svg { --muted: #a0a9b4; --line: #2c333c; } }"
    "</style>"
)


@dataclass(frozen=True)
class Story:
    """All that is known of a run; what it lacks is empty."""

    info: RunInfo
    records: Sequence[StepRecord]
    summary: Summary
    timeline: Sequence[ComputeEvent] = ()
    traces: Traces | None = None
    places: Sequence[Place] = ()
    notes: Sequence[Note] = ()
    now: Sequence[tuple[str, str, str]] = ()
    """Source, target and state of a connection, while the run goes on."""
    ended: str | None = None
    """Why the run is over, "" where nothing is known; None while it goes on."""
    silent_s: float = 0.0
    """For how long no step had come when this was read."""


def content(story: Story, rows: Rows) -> Json:
    """The parts of a page about a run, each of which can change alone."""
    summary = story.summary
    return {
        "head": _head(story),
        "cards": _cards(story),
        "charts": [*_charts(story, rows), *edge_charts(story.traces or {})],
        "tables": [*_wire_tables(summary), *_edge_table(story), *_place_tables(story)],
        "timeline": _timeline(story.timeline),
        "notes": [note for note in story.notes if note["kind"] != "sample"],
        "samples": [note for note in story.notes if note["kind"] == "sample"],
        "details": _details(summary),
    }


def table(
    place: str, title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], **more: Any
) -> Json:
    """A table of the section `place`; `texts` columns are text, the others numbers."""
    return {"place": place, "title": title, "heads": heads, "rows": rows, "texts": 1, **more}


def silence(story: Story, silent_s: float) -> str:
    """That no step has come for so long, if that is unusual and the run is not over."""
    usual_s = _usual_s(story)
    if _is_over(story) or silent_s <= max(_SILENT_S, _SILENT_STEPS * usual_s):
        return ""
    words = f"No step for {format_duration(silent_s)}; one usually takes"
    return f"{words} {format_duration(usual_s)}."


def _usual_s(story: Story) -> float:
    return median(record.step_s for record in story.records[-_LATELY:])


def _is_over(story: Story) -> bool:
    return story.ended is not None or story.records[-1].step >= story.info.total_steps


def _head(story: Story) -> Json:
    info, records = story.info, story.records
    done, over = records[-1].step, _is_over(story)
    left_s = 0.0 if over else _usual_s(story) * (info.total_steps - done)
    epochs = story.summary["epochs"]
    return {
        "name": info.name,
        "about": " \N{MIDDLE DOT} ".join(
            (*info.shape, f"{epochs} epochs" if over else f"epoch {epochs}")
        ),
        "done": done,
        "total": info.total_steps,
        "left": format_duration(left_s) if left_s else "",
        "over": over,
        "state": "" if done >= info.total_steps and not story.ended else _state(story, done),
    }


def _state(story: Story, done: int) -> str:
    where = f"step {done:,} of {story.info.total_steps:,}"
    if story.ended is None:
        return f"{where.capitalize()}."
    why = story.ended.rstrip(".")
    return f"Ended after {where}: {why}." if why else f"Ended after {where}."


def _cards(story: Story) -> list[tuple[str, str]]:
    summary = story.summary
    keys = (*LOSSES, *SPEED, "sent", "ratio_bf16", "wall_s")
    cards = shown(keys, summary, unit=summary["unit"], long=True)
    cards += [(f"Evaluation {name}", value) for name, value in other_scores(summary["eval"] or {})]
    return [card for card in cards if card[1] != NOTHING]


def _line(name: str, column: str, color: int = 0, look: str = "line", **more: Any) -> Json:
    return {"label": name, "column": column, "color": color, "look": look, **more}


def _charts(story: Story, rows: Rows) -> list[Json]:
    info = story.info
    each = "each step" if rows.stride == 1 else f"mean of {rows.stride} steps"
    loss = [
        _line(each, "loss", look="thin", smooth=True),
        _line("skipped step", "skipped", 4, "disc", at="loss"),
        _line("evaluation, compressed", "eval_compressed", 1, "diamond"),
        _line("evaluation", "eval", 1, "disc"),
    ]
    if rows.stride > 1:
        loss[:0] = [_line("lowest", "low", look="faint"), _line("highest", "high", look="faint")]
    speed = label("Tokens per second", info.unit)
    charts: list[Json] = [
        {"place": "loss", "title": "Loss by step", "text": _LOSS, "lines": loss},
        {"place": "speed", "title": f"{speed}, all replicas together", "zero": True,
         "lines": [_line(each, "tokens_per_s", 2, "thin", smooth=True)]},
        {"place": "speed", "title": "Bubble, % of the step without compute", "zero": True,
         "lines": [_line(each, "bubble", 3, "thin", smooth=True)]},
    ]  # fmt: skip
    return charts + _bytes_chart(story, rows) + _error_chart(rows)


def _bytes_chart(story: Story, rows: Rows) -> list[Json]:
    """Bytes that crossed each cut in each step; equal cuts share a line."""
    info, columns = story.info, rows.columns()
    groups: dict[tuple[str, str, tuple[Any, ...]], list[int]] = {}
    for cut, way in info.wire_keys(story.records):
        if (column := columns.get(f"{cut} {way}")) is not None:
            groups.setdefault((way, info.method((cut, way)), tuple(column)), []).append(cut)
    if not groups:
        return []
    lines = [
        _line(f"{way}, {method} ({_cut_list(cuts)})", f"{cuts[0]} {way}", number % 6,
              "line" if way == "forward" else "dash")
        for number, ((way, method, _), cuts) in enumerate(groups.items())
    ]  # fmt: skip
    values = {c.values for c in next((r.wire for r in story.records if r.wire), ())}
    sizes = [(name, size * next(iter(values))) for name, size in (("bf16", 2), ("fp32", 4))]
    aqsgd = any(row["method"].startswith("aqsgd") for row in story.summary["wire"])
    return [{"place": "bytes", "title": "Bytes per step over each cut", "lines": lines, "log": True,
             "text": _BYTES + _AQSGD * aqsgd, "unit": "bytes",
             "levels": sizes if len(values) == 1 else []}]  # fmt: skip


def _error_chart(rows: Rows) -> list[Json]:
    kinds = (
        ("error, forward", "channel_error forward"),
        ("error, backward", "channel_error backward"),
        ("change since the last epoch", "channel_change forward"),
    )
    columns = rows.columns()
    lines = [
        _line(name, column, color, ("line", "dash", "dot")[color], smooth="only")
        for color, (name, column) in enumerate(kinds)
        if any(value is not None for value in columns.get(column, ()))
    ]
    chart = {"place": "error", "title": "Compression error by step", "text": _ERROR,
             "lines": lines, "zero": True}  # fmt: skip
    return [chart] if lines else []


def edge_charts(traces: Traces) -> list[Json]:
    """Mbit/s that left each host for each other; diamonds where a connection was resumed."""
    samples = [(source, s) for source, own in traces.items() for s in own]
    seconds = sorted({round(sample["end_s"]) for _, sample in samples})
    if not seconds:
        return []
    places = {second: place for place, second in enumerate(seconds)}
    empty: list[float | None] = [None] * len(seconds)
    columns: dict[str, list[float | None]] = {"step": [*seconds], "resumed": [*empty]}
    for source, sample in samples:
        name = f"{source} \N{RIGHTWARDS ARROW} {sample['target']}"
        place, mbps = places[round(sample["end_s"])], round(8e-6 * sample["sent_Bps"], 3)
        columns.setdefault(name, [*empty])[place] = mbps
        if sample["resumed"]:
            columns["resumed"][place] = mbps
    looks = [(n % 6, ("line", "dash", "dot")[(n + n // 6) % 3]) for n in range(18)]
    names = [name for name in columns if name not in ("step", "resumed")]
    lines = [
        _line(name, name, *looks[number % len(looks)], gaps=True)
        for number, name in enumerate(names)
    ]
    lines.append(_line("resumed", "resumed", 1, "diamond"))
    return [{"place": "edges", "title": "Mbit/s from machine to machine", "text": _EDGES,
             "lines": lines, "zero": True, "columns": columns, "along": "second"}]  # fmt: skip


def _wire_tables(summary: Summary) -> list[Json]:
    if not summary["wire"]:
        return []
    heads = ("Cut", "Direction", "Method", "Messages", "Sent", "As bf16", "Ratio", "As fp32")
    rows = [
        [str(row["cut"]), row["direction"], row["method"], *_amounts(row)]
        for row in summary["wire"]
    ]
    total = ["All cuts", "", "", *_amounts(summary["totals"])]
    text = '"Sent" includes message headers. Ratios are to the same values uncompressed.'
    traffic = table("bytes", "Traffic of the whole run", (*heads, "Ratio"), rows, texts=3,
                    total=total, text=text)  # fmt: skip
    return [traffic, *_measured_table(summary)]


def _measured_table(summary: Summary) -> list[Json]:
    """Means over the last epoch; columns that nothing was measured for are left out."""
    columns: dict[str, Callable[[WireTraffic], str]] = {
        "Error": lambda row: _number(row["channel_error"]),
        "Worst channel": lambda row: _channel(row["worst_channel"], row["worst_error"], "{:.3g}"),
        "Error of all values": lambda row: _number(row["error"]),
        "Change": lambda row: _number(row["channel_change"]),
        "Change of all values": lambda row: _number(row["change"]),
        "Cosine to the last epoch": lambda row: _number(row["cosine"]),
        "Largest channel": lambda row: _channel(
            row["largest_channel"], row["largest_share"], "{:.0%} of the energy"
        ),
        "Massive tokens": lambda row: _number(row["massive_tokens"]),
        _GAIN: lambda row: _number(row["gain"]),
        "Dimensions for 95 %": lambda row: _number(row["dimensions"]),
    }
    cells = {name: [show(row) for row in summary["wire"]] for name, show in columns.items()}
    kept = {name: column for name, column in cells.items() if {*column} != {NOTHING}}
    if not kept:
        return []
    rows = [
        [str(row["cut"]), row["direction"], *(column[i] for column in kept.values())]
        for i, row in enumerate(summary["wire"])
    ]
    text = _MEASURED + _GAIN_TEXT * (_GAIN in kept)
    heads = ("Cut", "Direction", *kept)
    return [table("error", "Errors and changes", heads, rows, texts=2, text=text)]


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"


def _channel(number: int | None, value: float | None, form: str) -> str:
    return NOTHING if number is None or value is None else f"{number}: {form.format(value)}"


def _amounts(row: Traffic) -> list[Any]:
    """Rounded numbers; the exact bytes are the title of a cell."""
    exact = iter((row["bytes"], row["bf16_bytes"], row["fp32_bytes"]))
    return [
        [cell, f"{next(exact):,} bytes"] if number in (1, 2, 4) else cell
        for number, cell in enumerate(traffic_cells(row))
    ]


def _edge_table(story: Story) -> list[Json]:
    edges, now = story.summary["edges"], {(a, b): state for a, b, state in story.now}
    if not edges:
        return []
    heads = ["From", "To", "Sent", "Mbit/s, mean", "Round trip", "Sent again", "Resumed",
             "Longest silence"]  # fmt: skip
    rows = [edge_cells(edge) for edge in edges]
    if now:
        heads.append("Now")
        for row, edge in zip(rows, edges, strict=True):
            row.append(now.get((edge["source"], edge["target"]), NOTHING))
    return [table("edges", "Connections between machines", heads, rows, texts=2)]


def _place_tables(story: Story) -> list[Json]:
    """A row for each replica and shard, a column for each position of the pipeline.

    A machine that rank 0's does not hear is marked.
    """
    if not (places := story.places):
        return []
    first = min(places, key=lambda place: place["rank"])["host"]
    unwell = {b: word for a, b, word in story.now if a == first and not word.startswith(UP)}
    sharded = any(place["shard"] for place in places)
    lines: dict[tuple[int, int], list[str]] = {}
    for place in sorted(places, key=lambda p: (p["replica"], p["shard"], p["stages"])):
        stages = ", ".join(map(str, place["stages"]))
        words = f"stage{'s' * (len(place['stages']) > 1)} {stages}: {place['host']}"
        line = lines.setdefault((place["replica"], place["shard"]), [])
        word = f" ({unwell[place['host']]})" if place["host"] in unwell else ""
        line.append(f"{words}, rank {place['rank']}{word}")
    rows = [
        [f"replica {replica}" + f", shard {shard}" * sharded, *cells]
        for (replica, shard), cells in lines.items()
    ]
    heads = ("Replica", *(f"Position {number}" for number in range(max(map(len, lines.values())))))
    return [table("places", "Where ranks run", heads, rows, texts=len(heads))]


def _timeline(events: Sequence[ComputeEvent]) -> Json | None:
    """An image: scripts in it would not run."""
    if not events:
        return None
    svg = timeline_svg(events).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    svg = svg.replace(">", f">{_DARK}", 1)
    data = base64.b64encode(svg.encode()).decode()
    ranks = len({event.rank for event in events})
    alt = f"Forward, backward, waiting and idle time of {ranks} ranks during one step"
    return {"src": f"data:image/svg+xml;base64,{data}", "alt": alt, "text": _TIMELINE}


def _details(summary: Summary) -> list[tuple[str, str]]:
    keys = ("steps", "train/skipped", "tokens", "speed/step_s", "first_loss", *TRAFFIC)
    keys += ("ratio_fp32", *(SHARDS if summary["shards"] > 1 else ()), "repaired")
    return [
        *shown(keys, summary, unit=summary["unit"], long=True, show_bytes=_exact),
        ("Machine", summary["machine"]),
        ("Versions", ", ".join(f"{name} {v}" for name, v in summary["versions"].items())),
        ("Configuration digest", summary["config_digest"]),
    ]


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)" if nbytes >= 1000 else f"{nbytes} bytes"


def _cut_list(cuts: Sequence[int]) -> str:
    return f"cut {cuts[0]}" if len(cuts) == 1 else "cuts " + ", ".join(map(str, cuts))
