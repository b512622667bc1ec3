"""The events of one training step on all ranks, on a common clock: their file, and a drawing.

Colours come from the Okabe-Ito set, which stays distinct for colour-blind readers.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ValidationError

from thinpipe.pipeline.wire.told import ComputeEvent, ScheduleName, WireTotal

_WIDTH, _LEFT, _RIGHT = 720, 92, 46  # px; at both ends of rows: rank and stages, and the idle share
_PITCH, _ROW, _STRIP = 20, 16, 2  # encoding and decoding overlap with compute: strips below it
_BELOW = 40  # px, for the axis and the legend
KINDS = {
    "F": ("forward", "#56a5dd"),
    "B": ("backward", "#f0a830"),
    "W": ("weight gradient", "#2fb58e"),
    "encode": ("encoding", "#cc79a7"),
    "decode": ("decoding", "#9d86d8"),
    "wait": ("waiting for a message", "url(#waits)"),  # as idle time, but hatched
    "idle": ("idle", "var(--line, #e3e6ea)"),
}
_HATCH = (
    '<pattern id="waits" width="4" height="4" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V4" style="stroke: var(--muted, #5b6570)"/>'
    "</pattern>"
)
FILE_NAME = "timeline.json"


class Timeline(BaseModel, frozen=True, extra="forbid"):
    """One step: its events, in seconds since the first rank began it, and its traffic.

    `step` counts from 1, `wire` sums over the replicas. `pipeline_ranks` ranks make a replica, or
    with shards a DP rank, in whose order (`pipeline/mesh.py`) events count ranks. A step runs the
    schedule `accumulate` times.
    """

    step: int
    schedule: ScheduleName
    depth: int
    microbatches: int
    accumulate: int
    pipeline_ranks: int
    replicas: int
    cuts: tuple[int, ...]
    wire: tuple[WireTotal, ...]
    events: tuple[ComputeEvent, ...]

    def write(self, folder: Path) -> None:
        (folder / FILE_NAME).write_text(self.model_dump_json(by_alias=True), encoding="utf-8")


def read_timeline(folder: Path) -> Timeline:
    """The timeline of a run.

    Raises:
        ValueError: the run has none, or the file is damaged.
    """
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; give that of a finished run, such as runs/quickstart"
        )
    try:
        return Timeline.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no timeline; it is written at the end of a run, on the first host, for a "
            "step of the second epoch (or the last step of a shorter run)"
        ) from None
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(f"{path}: not a timeline ({key}); run the training again") from None


def timeline_svg(events: Sequence[ComputeEvent]) -> str:
    """One row per rank, with its compute, waits and idle time."""
    end_s = max(event.end_s for event in events) or 1.0
    numbered = _numbered_kinds(events, end_s)
    ranks = sorted({event.rank for event in events})
    height = len(ranks) * _PITCH + _BELOW
    parts = [
        f'<svg class="wide" viewBox="0 0 {_WIDTH} {height}" role="img" font-size="9" '
        f'font-family="system-ui, sans-serif" aria-label="What each rank did during one step">',
        _HATCH,
    ]
    for row, rank in enumerate(ranks):
        own = [event for event in events if event.rank == rank]
        parts += _row(row * _PITCH, rank, own, end_s, numbered)
    return "".join([*parts, *_axis(len(ranks) * _PITCH, end_s), *_legend(events, height), "</svg>"])


def _row(
    top: float, rank: int, events: Sequence[ComputeEvent], end_s: float, numbered: set[str]
) -> list[str]:
    """Later stages of one rank are paler, as in the usual drawings of interleaved schedules."""
    stages = sorted({event.stage for event in events})
    name = f"rank {rank}, stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
    busy_s = sum(event.end_s - event.start_s for event in events if event.computes)
    middle = top + _ROW / 2 + 3
    parts = [
        _text(_LEFT - 6, middle, name, "end"),
        _text(_WIDTH - _RIGHT + 5, middle, f"{max(0.0, 1 - busy_s / end_s):.0%} idle", "start"),
        _box("idle", _LEFT, top, _WIDTH - _LEFT - _RIGHT, _ROW),
    ]
    heights = {"encode": (_ROW - _STRIP, _STRIP), "decode": (_ROW - 2 * _STRIP, _STRIP)}
    for event in events:
        below, height = heights.get(event.kind, (0, _ROW - 2 * _STRIP))
        x, width = _x(event.start_s, end_s), _x(event.end_s, end_s) - _x(event.start_s, end_s)
        pale = max(0.3, 1 - 0.35 * stages.index(event.stage))
        parts.append(_box(event.kind, x, top + below, width, height, pale))
        if event.kind in numbered:
            number = _text(x + width / 2, middle - _STRIP, str(event.microbatch), "middle")
            parts.append(number.replace("var(--muted, #5b6570)", "#11151a"))
    return parts


def _numbered_kinds(events: Sequence[ComputeEvent], end_s: float) -> set[str]:
    """The kinds of compute whose boxes are typically wide enough for the largest number."""
    digits = max(len(str(event.microbatch)) for event in events)
    widths: dict[str, list[float]] = {}
    for event in events:
        if event.computes:
            widths.setdefault(event.kind, []).append(event.end_s - event.start_s)
    return {kind for kind, own in widths.items() if median(own) > 0.0105 * digits * end_s}


def _axis(top: float, end_s: float) -> list[str]:
    unit_s, unit = (1.0, "s") if end_s >= 2 else (1e-3, "ms")
    step = _round_step(end_s / unit_s / 8)
    ticks = [number * step for number in range(int(end_s / unit_s / step) + 1)]
    return [
        _text(_x(tick * unit_s, end_s), top + 8, f"{tick:g} {unit}", "middle") for tick in ticks
    ]


def _legend(events: Sequence[ComputeEvent], height: float) -> list[str]:
    seen, x, parts = {"idle", *(event.kind for event in events)}, float(_LEFT), []
    for kind, (name, _) in KINDS.items():
        if kind in seen:
            parts += [_box(kind, x, height - 13, 10, 9), _text(x + 14, height - 5, name, "start")]
            x += 26 + 5 * len(name)
    return parts


def _round_step(rough: float) -> float:
    """The nearest step that people count in."""
    power = 10.0 ** math.floor(math.log10(rough))
    return min((m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0)), key=lambda s: abs(s - rough))


def _x(seconds: float, end_s: float) -> float:
    return _LEFT + seconds / end_s * (_WIDTH - _LEFT - _RIGHT)


def _box(kind: str, x: float, y: float, width: float, height: float, opacity: float = 1.0) -> str:
    look = f"fill: {KINDS[kind][1]}" + f"; opacity: {opacity:.2f}" * (opacity < 1)
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'style="{look}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'style="fill: var(--muted, #5b6570)">{escape(text)}</text>'
    )
