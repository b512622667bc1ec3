"""The picture of a run, as PNG bytes: loss and bytes over each cut by step."""

import math
from collections.abc import Sequence
from itertools import cycle, pairwise

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from thinpipe.launch.report.charts import sent_curves
from thinpipe.launch.report.metrics import RunInfo, StepRecord
from thinpipe.launch.report.smoothing import smoothed
from thinpipe.launch.report.theme import LIGHT, Theme, new_figure, style, to_png
from thinpipe.launch.words import format_bytes

_MOST_EPOCH_LABELS = 12


def overview_png(info: RunInfo, records: Sequence[StepRecord], theme: Theme = LIGHT) -> bytes:
    """Loss above bytes per step, on one step axis; only the loss if there are no cuts."""
    if not info.wire_keys(records):
        return loss_png(records, theme)
    figure = new_figure(6.6, theme)
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_loss(above, records, theme)
    above.set_xlabel("")
    _draw_bytes(below, info, records, theme=theme)
    return to_png(figure)


def loss_png(records: Sequence[StepRecord], theme: Theme = LIGHT) -> bytes:
    """Training loss of every step, its running mean, and the evaluations."""
    figure = new_figure(3.6, theme)
    _draw_loss(figure.subplots(), records, theme)
    return to_png(figure)


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
    style(axes, "Loss", theme)
    raw, smooth, evaluation = theme.series[0], theme.series[0], theme.series[1]
    steps = [record.step for record in records]
    losses = [record.loss if math.isfinite(record.loss) else math.nan for record in records]
    dot = "o" if len(records) < 8 else None
    axes.plot(
        steps, losses, color=raw, linewidth=0.8, alpha=0.38, marker=dot, label="train, each step"
    )
    axes.plot(
        steps,
        smoothed(losses, reach=len(losses) // 40 + 1),
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
    style(axes, "Bytes per step over each cut", theme)
    steps = [record.step for record in records]
    dot = "o" if len(records) < 8 else None
    axes.set_yscale("log")
    colors = cycle(theme.series)
    for (label, direction, nbytes), color in zip(sent_curves(info, records), colors, strict=False):
        axes.plot(
            steps,
            nbytes,
            color=color,
            linestyle="-" if direction == "forward" else "--",
            linewidth=1.8,
            drawstyle="steps-mid",
            marker=dot,
            label=label,
        )
    _draw_baselines(axes, records, theme)
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick_bytes))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _step_axis(axes, records, theme)
    _legend(axes, theme, columns=2)


def _tick_bytes(nbytes: float, _position: int | None) -> str:
    number, unit = format_bytes(nbytes).split()
    return f"{float(number):g} {unit}"


def _draw_baselines(axes: Axes, records: Sequence[StepRecord], theme: Theme) -> None:
    """Lines for uncompressed sizes, if they are equal at all cuts."""
    values = {count.values for count in next((r.wire for r in records if r.wire), ())}
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
