"""The timeline of one step as a plot: a row per rank, a box per forward, backward and wait."""

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from thinpipe.launch.report.theme import LIGHT, Theme, new_figure, style, to_png
from thinpipe.pipeline.stage import ComputeEvent

_ROW = 0.78
_STRIP = 0.09  # of encoding and decoding, at the bottom of a row, as they overlap with compute
KINDS = {
    "F": ("forward", "#56a5dd"),
    "B": ("backward", "#f0a830"),
    "W": ("weight gradient", "#2fb58e"),
    "encode": ("encoding", "#cc79a7"),
    "decode": ("decoding", "#9d86d8"),
    "wait": ("waiting for a message", None),  # as idle time, but hatched
}
_NUMBER = "#11151a"


def timeline_png(events: Sequence[ComputeEvent], theme: Theme = LIGHT) -> bytes:
    """One row per rank, with its compute, waits and idle time.

    Raises:
        ValueError: there are no events to draw.
    """
    if not events:
        raise ValueError("timeline has no events; record one step with its events to draw it")
    rows = len({event.rank for event in events})
    figure = new_figure(min(1.5 + 0.48 * rows, 18.0), theme)
    _draw_timeline(figure.subplots(), events, theme)
    return to_png(figure)


def _draw_timeline(axes: Axes, events: Sequence[ComputeEvent], theme: Theme) -> None:
    style(axes, "One step, rank by rank", theme, title_pad=8)
    end_s = max(event.end_s for event in events) or 1.0
    unit_s, unit = (1.0, "seconds") if end_s >= 2 else (1e-3, "milliseconds")
    numbered = _numbered_kinds(events, end_s)
    ranks = sorted({event.rank for event in events})
    labels = []
    for row, rank in enumerate(ranks):
        own = [event for event in events if event.rank == rank]
        stages = sorted({event.stage for event in own})
        axes.barh(row, end_s / unit_s, height=_ROW, color=theme.idle)
        for chunk, stage in enumerate(stages):
            boxes = [event for event in own if event.stage == stage]
            _draw_boxes(axes, boxes, at=(row, chunk, unit_s), theme=theme)
        _number_boxes(axes, [e for e in own if e.kind in numbered], at=(row, unit_s))
        plural = "stage" if len(stages) == 1 else "stages"
        labels.append(f"rank {rank}, {plural} {', '.join(map(str, stages))}")
        busy_s = sum(event.end_s - event.start_s for event in own if event.computes)
        axes.annotate(
            f"{max(0.0, 1 - busy_s / end_s):.0%} idle",
            (1.008, row),
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


def _numbered_kinds(events: Sequence[ComputeEvent], end_s: float) -> set[str]:
    """The kinds of compute whose boxes are typically wide enough for the largest number."""
    digits = max(len(str(event.microbatch)) for event in events)
    widths: dict[str, list[float]] = {}
    for event in events:
        if event.computes:
            widths.setdefault(event.kind, []).append(event.end_s - event.start_s)
    return {kind for kind, own in widths.items() if median(own) > 0.0105 * digits * end_s}


def _draw_boxes(
    axes: Axes, events: Sequence[ComputeEvent], *, at: tuple[int, int, float], theme: Theme
) -> None:
    """Draw one stage's boxes; `at`: row, number of the stage within its rank, seconds per unit.

    Later stages of one rank are paler, as in the usual drawings of interleaved schedules.
    """
    row, chunk, unit_s = at
    top, bottom = row - _ROW / 2, row + _ROW / 2
    heights = {"decode": (bottom - 2 * _STRIP, _STRIP), "encode": (bottom - _STRIP, _STRIP)}
    for kind, (_, color) in KINDS.items():
        spans = [
            (event.start_s / unit_s, (event.end_s - event.start_s) / unit_s)
            for event in events
            if event.kind == kind
        ]
        waiting = kind == "wait"
        axes.broken_barh(
            spans,
            heights.get(kind, (top, _ROW - 2 * _STRIP)),
            facecolor=_paler(color or theme.idle, theme.idle, min(0.35 * chunk, 0.7)),
            edgecolor=theme.faint if waiting else theme.surface,
            linewidth=0.0 if waiting else 0.6,
            hatch="////" if waiting else None,
        )


def _number_boxes(axes: Axes, events: Sequence[ComputeEvent], *, at: tuple[int, float]) -> None:
    row, unit_s = at
    for event in events:
        text = axes.text(
            (event.start_s + event.end_s) / 2 / unit_s,
            row - _STRIP,
            str(event.microbatch),
            ha="center",
            va="center_baseline",
            color=_NUMBER,
            fontsize=8,
        )
        text.set_in_layout(False)


def _paler(color: str, towards: str, amount: float) -> tuple[float, float, float]:
    red, green, blue = (
        (1 - amount) * a + amount * b for a, b in zip(to_rgb(color), to_rgb(towards), strict=True)
    )
    return red, green, blue


def _timeline_legend(axes: Axes, events: Sequence[ComputeEvent], theme: Theme) -> None:
    """Name the kinds that occur, and idle time, which is the empty row."""
    seen = {event.kind for event in events}
    handles = [
        Patch(
            facecolor=color or theme.idle,
            edgecolor=theme.faint,
            label=label,
            hatch="////" if kind == "wait" else None,
            linewidth=0,
        )
        for kind, (label, color) in KINDS.items()
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
