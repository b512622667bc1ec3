"""The charts of a report: loss, bytes over each cut, compression error, rates of connections."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from thinpipe.launch.host.words import format_bytes
from thinpipe.launch.view.report.edges import Traces
from thinpipe.launch.view.report.metrics import RunInfo, StepRecord
from thinpipe.launch.view.report.smoothing import smoothed
from thinpipe.launch.view.report.svg import Chart, Line, epoch_starts
from thinpipe.pipeline.wire.header import Direction


def loss_chart(records: Sequence[StepRecord]) -> Chart:
    """Training loss of every step, its running mean, and the evaluations."""
    losses = [record.loss if math.isfinite(record.loss) else math.nan for record in records]
    means = smoothed(losses, len(losses) // 40 + 1).tolist()
    skipped = [mean if r.skipped else math.nan for r, mean in zip(records, means, strict=True)]
    lines = [Line("each step", losses, 0, "thin"), Line("smoothed", means, 0)]
    lines.append(Line("skipped step", skipped, 4, "disc"))
    looks = (
        ("loss_compressed", "evaluation, compressed", "diamond"),
        ("loss", "evaluation", "disc"),
    )
    for key, label, look in looks:
        lines.append(Line(label, [(r.eval or {}).get(key, math.nan) for r in records], 1, look))
    return _chart("Loss by step", records, lines)


def bytes_chart(info: RunInfo, records: Sequence[StepRecord]) -> Chart:
    """Bytes that crossed each cut in each step, with bf16 and fp32 as levels."""
    colors = cycle(range(6))
    lines = [
        Line(label, nbytes, color, "line" if direction == "forward" else "dash")
        for (label, direction, nbytes), color in zip(
            sent_curves(info, records), colors, strict=False
        )
    ]
    values = {count.values for count in next((r.wire for r in records if r.wire), ())}
    levels = [("bf16", 2.0 * v) for v in values] + [("fp32", 4.0 * v) for v in values]
    levels = levels if len(values) == 1 else []
    chart = _chart("Bytes per step over each cut", records, lines)
    return replace(chart, levels=levels, show=format_bytes, log=True)


def error_chart(records: Sequence[StepRecord]) -> Chart:
    """Errors and changes of the median channel, smoothed, as one sample is measured per step."""
    reach = max(1, len(records) // 50)
    kinds: tuple[tuple[str, Direction, str], ...] = (
        ("error, forward", "forward", "channel_error"),
        ("error, backward", "backward", "channel_error"),
        ("change since the last epoch", "forward", "channel_change"),
    )
    lines = []
    for color, (label, way, name) in enumerate(kinds):
        curve = [_mean_over_cuts(record, way, name) for record in records]
        measured = next((i for i, value in enumerate(curve) if math.isfinite(value)), len(curve))
        tail = smoothed(curve[measured:], reach).tolist() if measured < len(curve) else []
        lines.append(Line(label, [math.nan] * measured + tail, color))
    chart = _chart("Compression error by step", records, lines)
    return replace(chart, from_zero=True, height=210)


def compared_losses(runs: Sequence[tuple[str, Sequence[StepRecord]]]) -> Chart:
    """Smoothed training losses of several runs."""
    steps = sorted({record.step for _, records in runs for record in records})
    lines = []
    for color, (name, records) in zip(cycle(range(6)), runs, strict=False):
        means = smoothed([r.loss for r in records], len(records) // 40 + 1)
        found = dict(zip((r.step for r in records), means.tolist(), strict=True))
        lines.append(Line(name, [found.get(step, math.nan) for step in steps], color))
    return Chart("Training loss, smoothed", steps, lines)


def edges_chart(traces: Traces) -> Chart:
    """Mbit/s that left each host for each other; diamonds where a connection was resumed."""
    samples = [(source, s) for source, own in traces.items() for s in own]
    seconds = sorted({round(sample["end_s"]) for _, sample in samples})
    places = {second: place for place, second in enumerate(seconds)}
    rates: dict[str, list[float]] = {}
    resumed = [math.nan] * len(seconds)
    for source, sample in samples:
        name = f"{source} \N{RIGHTWARDS ARROW} {sample['target']}"
        place, mbps = places[round(sample["end_s"])], 8e-6 * sample["sent_Bps"]
        rates.setdefault(name, [math.nan] * len(seconds))[place] = mbps
        if sample["resumed"]:
            resumed[place] = mbps
    looks = [(color, look) for look in ("line", "dash", "thin") for color in range(6)]
    lines = [
        Line(name, curve, *look)
        for (name, curve), look in zip(rates.items(), cycle(looks), strict=False)
    ]
    lines.append(Line("resumed", resumed, 1, "diamond"))
    return Chart("Mbit/s from machine to machine", seconds, lines, from_zero=True, unit="second")


def sent_curves(
    info: RunInfo, records: Sequence[StepRecord]
) -> list[tuple[str, Direction, list[float]]]:
    """Label, direction and bytes per step, NaN where nothing was sent; equal cuts share a curve."""
    rows = {key: [0] * len(records) for key in info.wire_keys(records)}
    for index, record in enumerate(records):
        for count in record.wire:
            rows[count.cut, count.direction][index] = count.nbytes
    groups: dict[tuple[Direction, str, tuple[int, ...]], list[int]] = {}
    for (cut, direction), row in rows.items():
        groups.setdefault((direction, info.method((cut, direction)), tuple(row)), []).append(cut)
    return [
        (f"{direction}, {method} ({_cut_list(cuts)})", direction, [n or math.nan for n in sent])
        for (direction, method, sent), cuts in groups.items()
    ]


def _chart(title: str, records: Sequence[StepRecord], lines: Sequence[Line]) -> Chart:
    steps = [record.step for record in records]
    return Chart(title, steps, lines, epoch_starts(steps, [record.epoch for record in records]))


def _cut_list(cuts: Sequence[int]) -> str:
    return f"cut {cuts[0]}" if len(cuts) == 1 else "cuts " + ", ".join(map(str, cuts))


def _mean_over_cuts(record: StepRecord, way: Direction, name: str) -> float:
    wire = [count for count in record.wire if count.direction == way]
    found = [getattr(count, name) for count in wire if getattr(count, name) is not None]
    return sum(found) / len(found) if found else math.nan
