"""The pictures of a run, as PNG bytes: loss, bytes per step, and the timeline of one step.

Colours come from the Okabe-Ito set, which stays distinct for colour-blind readers; what matters is
also told apart by line style, hatching or text. Figures are built without pyplot, so nothing
global changes.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from launch.metrics import (
    Direction,
    RunInfo,
    StepRecord,
    TimelineEvent,
    format_bytes,
)

_WIDTH_IN = 9.0
_DPI = 150
_MOST_EPOCH_LABELS = 12
_LANE = 0.78
_STRIP = 0.09  # of encoding and decoding, at the bottom of a lane: they go on beside the rest
_KINDS = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradient",
    "encode": "encoding",
    "decode": "decoding",
    "wait": "waiting for a message",
}


@dataclass(frozen=True)
class Theme:
    """Colours of a picture: the page below, text, secondary text, lines, and the data's own."""

    surface: str
    ink: str
    muted: str
    grid: str
    idle: str
    faint: str  # the hatching of a wait
    series: tuple[str, ...]
    kinds: tuple[str, ...]  # in the order of _KINDS
    on_kind: str


LIGHT = Theme(
    surface="#ffffff",
    ink="#1c2128",
    muted="#5b6570",
    grid="#e3e6ea",
    idle="#eceef1",
    faint="#b3bac3",
    series=("#0072b2", "#d55e00", "#009e73", "#b8578a", "#8c6d00", "#3f9fd8"),
    kinds=("#56a5dd", "#f0a830", "#2fb58e", "#cc79a7", "#9d86d8", "#eceef1"),
    on_kind="#11151a",
)
DARK = Theme(
    surface="#171b21",
    ink="#e8ebef",
    muted="#a0a9b4",
    grid="#2c333c",
    idle="#262c34",
    faint="#5a6470",
    series=("#56b4e9", "#f08a4b", "#2fc597", "#dd94bd", "#e6c84a", "#8fa8ff"),
    kinds=("#56a5dd", "#f0a830", "#2fb58e", "#cc79a7", "#9d86d8", "#262c34"),
    on_kind="#11151a",
)


def overview_png(info: RunInfo, records: Sequence[StepRecord], theme: Theme = LIGHT) -> bytes:
    """Loss above bytes per step, on one step axis; only the loss when nothing crosses a cut."""
    if not info.cuts:
        return loss_png(records, theme)
    figure = _figure(6.6, theme)
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_loss(above, records, theme)
    above.set_xlabel("")
    _draw_bytes(below, info, records, theme=theme)
    return _png(figure)


def loss_png(records: Sequence[StepRecord], theme: Theme = LIGHT) -> bytes:
    """Training loss of every step, its running mean, and the evaluations."""
    figure = _figure(3.6, theme)
    _draw_loss(figure.subplots(), records, theme)
    return _png(figure)


def bytes_png(info: RunInfo, records: Sequence[StepRecord], theme: Theme = LIGHT) -> bytes:
    """Bytes that crossed each cut in each step, beside what bf16 and fp32 would have taken."""
    figure = _figure(3.6, theme)
    _draw_bytes(figure.subplots(), info, records, theme=theme)
    return _png(figure)


def signal_png(records: Sequence[StepRecord], theme: Theme = LIGHT) -> bytes:
    """What compression does to values: relative errors, and the size of changes, over the steps."""
    figure = _figure(3.0, theme)
    _draw_signal(figure.subplots(), records, theme)
    return _png(figure)


def timeline_png(events: Sequence[TimelineEvent], theme: Theme = LIGHT) -> bytes:
    """One lane per rank: what it computed when, and when it was idle.

    Raises:
        ValueError: there are no events to draw.
    """
    if not events:
        raise ValueError("timeline has no events; record one step with its events to draw it")
    lanes = len({event.rank for event in events})
    figure = _figure(min(1.5 + 0.48 * lanes, 18.0), theme)
    _draw_timeline(figure.subplots(), events, theme)
    return _png(figure)


def _figure(height_in: float, theme: Theme) -> Figure:
    return Figure(
        figsize=(_WIDTH_IN, height_in), dpi=_DPI, facecolor=theme.surface, layout="constrained"
    )


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=figure.get_facecolor())
    return buffer.getvalue()


def _style(axes: Axes, title: str, theme: Theme, *, title_pad: float = 18) -> None:
    axes.set_title(
        title, loc="left", color=theme.ink, fontsize=11, fontweight="bold", pad=title_pad
    )
    axes.set_facecolor(theme.surface)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.muted)
    axes.tick_params(which="both", length=0, colors=theme.muted, labelsize=9)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def _legend(axes: Axes, theme: Theme, columns: int) -> None:
    """Put the legend below the axes, closer where a shared step axis is labelled elsewhere."""
    handles, _ = axes.get_legend_handles_labels()
    labelled = axes.xaxis.get_tick_params()["labelbottom"]
    if handles:
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.16 if labelled else -0.02),
            ncols=columns,
            frameon=False,
            fontsize=9,
            labelcolor=theme.ink,
        )


def _step_axis(axes: Axes, records: Sequence[StepRecord], theme: Theme) -> None:
    """Label the steps, and draw a faint line where each epoch begins."""
    first, last = records[0].step, records[-1].step
    room = max(0.5, 0.012 * (last - first))
    axes.set_xlim(first - room, last + room)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step", color=theme.muted, fontsize=9, loc="right")
    starts = [(first, records[0].epoch)]
    starts += [(b.step, b.epoch) for a, b in pairwise(records) if b.epoch != a.epoch]
    stride = math.ceil(len(starts) / _MOST_EPOCH_LABELS)
    for step, epoch in starts[::stride]:
        if step != first:
            axes.axvline(step - 0.5, color=theme.muted, linewidth=0.8, alpha=0.45, zorder=0.5)
        axes.annotate(
            f"epoch {epoch}",
            (max(step - 0.5, first - room), 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 3),
            textcoords="offset points",
            color=theme.muted,
            fontsize=8,
        )


def _draw_loss(axes: Axes, records: Sequence[StepRecord], theme: Theme) -> None:
    _style(axes, "Loss", theme)
    raw, smooth, evaluation = theme.series[0], theme.series[0], theme.series[1]
    steps = [record.step for record in records]
    losses = [record.loss if math.isfinite(record.loss) else math.nan for record in records]
    dot = "o" if len(records) < 8 else None
    axes.plot(
        steps, losses, color=raw, linewidth=0.8, alpha=0.38, marker=dot, label="train, each step"
    )
    axes.plot(
        steps,
        _smoothed(losses, reach=len(losses) // 40 + 1),
        color=smooth,
        linewidth=2.0,
        marker=dot,
        label="train, smoothed",
    )
    _draw_evaluations(axes, records, color=evaluation, surface=theme.surface)
    skipped = [record.step for record in records if record.skipped]
    if skipped:
        axes.plot(
            skipped,
            [0.02] * len(skipped),
            "x",
            transform=axes.get_xaxis_transform(),
            color=theme.ink,
            markersize=5,
            label="skipped step",
        )
    axes.margins(y=0.12)
    _step_axis(axes, records, theme)
    _legend(axes, theme, columns=5)


def _smoothed(losses: Sequence[float], reach: int) -> npt.NDArray[np.float64]:
    """Mean over `reach` steps to either side, nearer ones weighing more; gaps are bridged.

    Beyond both ends the curve is continued by its mirrored trend, so that the mean neither lags
    nor flattens there.
    """
    values = np.asarray(losses, dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(values))
    if not finite.size:
        return values
    bridged = np.interp(np.arange(values.size), finite, values[finite])
    padded = np.pad(bridged, reach, mode="reflect", reflect_type="odd")
    window = np.bartlett(2 * reach + 3)[1:-1]
    mean: npt.NDArray[np.float64] = np.convolve(padded, window / window.sum(), mode="valid")
    return mean


def _draw_evaluations(
    axes: Axes, records: Sequence[StepRecord], *, color: str, surface: str
) -> None:
    """Plain evaluations as discs; those with compressed boundaries as larger open diamonds."""
    looks = (("loss_compressed", "eval, compressed", "D", 7.5), ("loss", "eval", "o", 4.5))
    for key, label, marker, size in looks:
        points = [(r.step, r.eval[key]) for r in records if r.eval is not None and key in r.eval]
        if not points:
            continue
        axes.plot(
            [step for step, _ in points],
            [loss for _, loss in points],
            marker,
            markersize=size,
            color=color,
            markerfacecolor=surface if key == "loss_compressed" else color,
            markeredgewidth=1.4,
            label=label,
            zorder=4,
        )


def _draw_bytes(axes: Axes, info: RunInfo, records: Sequence[StepRecord], *, theme: Theme) -> None:
    _style(axes, "Bytes per step over each cut", theme)
    steps = [record.step for record in records]
    dot = "o" if len(records) < 8 else None
    axes.set_yscale("log")
    for index, curve in enumerate(_curves(info, records)):
        axes.plot(
            steps,
            curve.nbytes,
            color=theme.series[index % len(theme.series)],
            linestyle="-" if curve.direction == "forward" else "--",
            linewidth=1.8,
            drawstyle="steps-mid",
            marker=dot,
            label=curve.label,
        )
    _draw_baselines(axes, records, theme)
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick_bytes))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _step_axis(axes, records, theme)
    _legend(axes, theme, columns=2)


def _draw_signal(axes: Axes, records: Sequence[StepRecord], theme: Theme) -> None:
    """Means over cuts and the reach of a running mean, as one sample is measured per step."""
    _style(axes, "Error and change, relative to the values sent", theme)
    curves = {
        "error, forward": [_mean_signal(r, "forward", "error") for r in records],
        "error, backward": [_mean_signal(r, "backward", "error") for r in records],
        "change since the last visit": [_mean_signal(r, "forward", "change") for r in records],
    }
    reach = max(1, len(records) // 50)
    for (label, curve), color in zip(curves.items(), theme.series, strict=False):
        measured = [i for i, value in enumerate(curve) if math.isfinite(value)]
        if measured:
            steps = [record.step for record in records[measured[0] :]]
            mean = _smoothed(curve[measured[0] :], reach)
            axes.plot(steps, mean, color=color, linewidth=1.8, label=label)
    axes.set_ylim(bottom=0)
    _step_axis(axes, records, theme)
    _legend(axes, theme, columns=3)


def _mean_signal(record: StepRecord, way: Direction, name: Literal["error", "change"]) -> float:
    wire = [count for count in record.wire if count.direction == way]
    found = [getattr(count, name) for count in wire if getattr(count, name) is not None]
    return sum(found) / len(found) if found else math.nan


def _tick_bytes(nbytes: float, _position: int | None) -> str:
    number, unit = format_bytes(nbytes).split()
    return f"{float(number):g} {unit}"


@dataclass(frozen=True)
class _Curve:
    label: str
    direction: Direction
    nbytes: list[float]


def _curves(info: RunInfo, records: Sequence[StepRecord]) -> list[_Curve]:
    """Bytes per step, NaN where nothing was sent; cuts whose bytes always agree share a curve."""
    rows = {key: [0] * len(records) for key in info.wire_keys()}
    for index, record in enumerate(records):
        for count in record.wire:
            rows[count.cut, count.direction][index] = count.bytes
    groups: dict[tuple[Direction, str, tuple[int, ...]], list[int]] = {}
    for (cut, direction), row in rows.items():
        groups.setdefault((direction, info.methods[cut, direction], tuple(row)), []).append(cut)
    return [
        _Curve(
            label=f"{direction}, {method} ({_cut_list(cuts)})",
            direction=direction,
            nbytes=[nbytes or math.nan for nbytes in row],
        )
        for (direction, method, row), cuts in groups.items()
    ]


def _cut_list(cuts: Sequence[int]) -> str:
    return f"cut {cuts[0]}" if len(cuts) == 1 else "cuts " + ", ".join(map(str, cuts))


def _draw_baselines(axes: Axes, records: Sequence[StepRecord], theme: Theme) -> None:
    """Lines for uncompressed sizes, where one pair of lines is true for every cut."""
    values = {count.values for count in records[0].wire}
    if len(values) != 1:
        return
    (per_step,) = values
    for name, width in (("bf16", 2), ("fp32", 4)):
        axes.axhline(width * per_step, color=theme.muted, linewidth=1.0, linestyle=":")
        axes.annotate(
            name,
            (1.0, width * per_step),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=theme.muted,
            fontsize=9,
        )


def _draw_timeline(axes: Axes, events: Sequence[TimelineEvent], theme: Theme) -> None:
    _style(axes, "One step, rank by rank", theme, title_pad=8)
    end_s = max(event.end_s for event in events) or 1.0
    unit_s, unit = (1.0, "seconds") if end_s >= 2 else (1e-3, "milliseconds")
    numbered = _numbered_kinds(events, end_s)
    ranks = sorted({event.rank for event in events})
    labels = []
    for lane, rank in enumerate(ranks):
        own = [event for event in events if event.rank == rank]
        stages = sorted({event.stage for event in own})
        axes.barh(lane, end_s / unit_s, height=_LANE, color=theme.idle)
        for chunk, stage in enumerate(stages):
            boxes = [event for event in own if event.stage == stage]
            _draw_boxes(axes, boxes, at=(lane, chunk, unit_s), theme=theme)
        _number_boxes(axes, [e for e in own if e.kind in numbered], at=(lane, unit_s), theme=theme)
        plural = "stage" if len(stages) == 1 else "stages"
        labels.append(f"rank {rank}, {plural} {', '.join(map(str, stages))}")
        busy_s = sum(event.end_s - event.start_s for event in own if event.computes)
        axes.annotate(
            f"{max(0.0, 1 - busy_s / end_s):.0%} idle",
            (1.008, lane),
            xycoords=axes.get_yaxis_transform(),
            va="center",
            color=theme.muted,
            fontsize=9,
        )
    axes.set_yticks(range(len(ranks)), labels)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, end_s / unit_s)
    axes.grid(visible=False)
    axes.set_xlabel(f"{unit} since the step began", color=theme.muted, fontsize=9, loc="right")
    _timeline_legend(axes, events, theme)


def _numbered_kinds(events: Sequence[TimelineEvent], end_s: float) -> set[str]:
    """The kinds of compute whose boxes are typically wide enough for the largest number."""
    digits = max(len(str(event.microbatch)) for event in events)
    widths: dict[str, list[float]] = {}
    for event in events:
        if event.computes:
            widths.setdefault(event.kind, []).append(event.end_s - event.start_s)
    return {kind for kind, own in widths.items() if median(own) > 0.0105 * digits * end_s}


def _draw_boxes(
    axes: Axes, events: Sequence[TimelineEvent], *, at: tuple[int, int, float], theme: Theme
) -> None:
    """Draw one stage's boxes; `at` is the lane, which of the rank's stages, seconds per unit.

    Later stages of one rank are paler, as in the usual drawings of interleaved schedules.
    """
    lane, chunk, unit_s = at
    top, bottom = lane - _LANE / 2, lane + _LANE / 2
    heights = {"decode": (bottom - 2 * _STRIP, _STRIP), "encode": (bottom - _STRIP, _STRIP)}
    for kind, color in zip(_KINDS, theme.kinds, strict=True):
        spans = [
            (event.start_s / unit_s, (event.end_s - event.start_s) / unit_s)
            for event in events
            if event.kind == kind
        ]
        waiting = kind == "wait"
        axes.broken_barh(
            spans,
            heights.get(kind, (top, _LANE - 2 * _STRIP)),
            facecolor=_paler(color, theme.idle, min(0.35 * chunk, 0.7)),
            edgecolor=theme.faint if waiting else theme.surface,
            linewidth=0.0 if waiting else 0.6,
            hatch="////" if waiting else None,
        )


def _number_boxes(
    axes: Axes, events: Sequence[TimelineEvent], *, at: tuple[int, float], theme: Theme
) -> None:
    lane, unit_s = at
    for event in events:
        text = axes.text(
            (event.start_s + event.end_s) / 2 / unit_s,
            lane - _STRIP,
            str(event.microbatch),
            ha="center",
            va="center_baseline",
            color=theme.on_kind,
            fontsize=8,
        )
        text.set_in_layout(False)


def _paler(color: str, towards: str, amount: float) -> tuple[float, float, float]:
    red, green, blue = (
        (1 - amount) * a + amount * b for a, b in zip(to_rgb(color), to_rgb(towards), strict=True)
    )
    return red, green, blue


def _timeline_legend(axes: Axes, events: Sequence[TimelineEvent], theme: Theme) -> None:
    """Name the kinds that occur, and idle time, which is the bare lane."""
    seen = {event.kind for event in events}
    handles = [
        Patch(
            facecolor=color,
            edgecolor=theme.faint,
            label=label,
            hatch="////" if kind == "wait" else None,
            linewidth=0,
        )
        for (kind, label), color in zip(_KINDS.items(), theme.kinds, strict=True)
        if kind in seen
    ]
    handles.append(Patch(facecolor=theme.idle, label="idle"))
    axes.figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=theme.ink,
    )
