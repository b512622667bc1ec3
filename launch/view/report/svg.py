"""Line charts by step as SVG: drawn without libraries, in the colours of the page around them.

Values show under the pointer or a finger (`SCRIPT`); text keeps its size on wide and narrow
screens (`STYLE`).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 76, 12, 22, 26
_MOST_POINTS = 600  # of a line: more cannot be seen
_TICKS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Line:
    """One curve: a value for every step, NaN where there is none.

    `look` is "line", "thin" (behind the others), "dash", "disc" or "diamond".
    """

    label: str
    values: Sequence[float]
    color: int = 0
    look: str = "line"


@dataclass(frozen=True)
class Chart:
    """Curves over common steps; `levels` are labelled horizontal lines."""

    title: str
    steps: Sequence[int]
    lines: Sequence[Line]
    epochs: Sequence[tuple[int, int]] = ()  # (first step, number)
    levels: Sequence[tuple[str, float]] = ()
    show: Callable[[float], str] = field(default=lambda value: f"{value:.4g}")
    log: bool = False
    from_zero: bool = False
    height: int = 250
    unit: str = "step"

    def svg(self) -> str:
        """The chart as an element of a page, or a sentence if there is nothing to draw."""
        drawn = [line for line in self.lines if any(map(math.isfinite, line.values))]
        if not drawn:
            return '<p class="muted">Nothing to draw yet.</p>'
        low, high = self._range(drawn)
        frame = _Frame(self, low, high)
        parts = [
            f'<svg class="chart" viewBox="0 0 {_WIDTH} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}" data-chart="{escape(self._data(drawn, frame))}">',
            *frame.grid(),
            *(frame.line(line) for line in drawn),
            f'<line class="cross" y1="{_TOP}" y2="{self.height - _BOTTOM}" visibility="hidden"/>',
            "</svg>",
        ]
        return f"<figure>{''.join(parts)}{_legend(drawn)}<output></output></figure>"

    def _range(self, lines: Sequence[Line]) -> tuple[float, float]:
        values = [v for line in lines for v in line.values if math.isfinite(v)]
        values += [level for _, level in self.levels]
        if self.log:
            values = [math.log10(v) for v in values if v > 0] or [0.0]
        low, high = min(values), max(values)
        if self.from_zero:
            low = min(low, 0.0)
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        return (low if self.from_zero else low - room), high + room

    def _data(self, lines: Sequence[Line], frame: "_Frame") -> str:
        """Data for the script: places and texts of steps, every n-th if there are many."""
        keep = _kept(len(self.steps), lines)
        return json.dumps(
            {
                "x": [round(frame.x(self.steps[i]), 1) for i in keep],
                "t": [
                    f"{self.unit} {self.steps[i]:,}: "
                    + ", ".join(
                        f"{line.label} {self.show(line.values[i])}"
                        for line in lines
                        if math.isfinite(line.values[i])
                    )
                    for i in keep
                ],
            }
        )


def _kept(count: int, lines: Sequence[Line]) -> list[int]:
    """Indices of steps to keep: few enough, and all that marks stand at."""
    stride = -(-count // _MOST_POINTS)
    marks = (
        index
        for line in lines
        if line.look in ("disc", "diamond")
        for index, value in enumerate(line.values)
        if math.isfinite(value)
    )
    return sorted({*range(0, count, stride), *marks, count - 1})


class _Frame:
    """Where values are on the chart."""

    def __init__(self, chart: Chart, low: float, high: float) -> None:
        self._chart, self._low, self._high = chart, low, high
        self._first, self._last = chart.steps[0], chart.steps[-1]

    def x(self, step: float) -> float:
        span = max(1, self._last - self._first)
        return _LEFT + (step - self._first) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        if self._chart.log:
            value = math.log10(value) if value > 0 else self._low
        room = self._chart.height - _TOP - _BOTTOM
        return _TOP + (self._high - value) / (self._high - self._low) * room

    def grid(self) -> list[str]:
        bottom, right = self._chart.height - _BOTTOM, _WIDTH - _RIGHT
        parts = []
        for value in self._ticks():
            y = self.y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(_text(_LEFT - 6, y + 4, self._chart.show(value), "end"))
        for step in _round_steps(self._first, self._last):
            parts.append(_text(self.x(step), bottom + 17, f"{step:,}", "middle"))
        parts.append(_text(_LEFT - 6, bottom + 17, self._chart.unit, "end"))
        stride = max(1, -(-len(self._chart.epochs) // 6))
        for step, number in self._chart.epochs[::stride]:
            x = self.x(step)
            parts.append(
                f'<line class="epoch" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
            )
            parts.append(_text(x + 3, _TOP - 8, f"epoch {number}", "start"))
        for name, level in self._chart.levels:
            y = self.y(level)
            parts.append(
                f'<line class="level" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(_text(right, y - 4, name, "end"))
        return parts

    def line(self, line: Line) -> str:
        points = [
            (self.x(self._chart.steps[i]), self.y(line.values[i]))
            for i in _kept(len(line.values), [line])
            if math.isfinite(line.values[i])
        ]
        if line.look in ("disc", "diamond") or len(points) == 1:
            return "".join(_mark(x, y, line) for x, y in points)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return f'<polyline class="{line.look} c{line.color}" points="{path}"/>'

    def _ticks(self) -> list[float]:
        if self._chart.log:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            all_ticks = [m * 10.0**p for p in powers for m in (1, 2, 5)]
            shown = [t for t in all_ticks if self._low <= math.log10(t) <= self._high]
            return shown[:: -(-len(shown) // 6)] if shown else []
        step = round_step((self._high - self._low) / 4)
        first = math.ceil(self._low / step)
        return [i * step for i in range(first, math.floor(self._high / step) + 1)]


def round_step(rough: float) -> float:
    """The nearest step that people count in."""
    power = 10.0 ** math.floor(math.log10(rough))
    return min((m * power for m in _TICKS), key=lambda step: abs(step - rough))


def _round_steps(first: int, last: int) -> list[int]:
    step = max(1, round(round_step(max(1, last - first) / 4)))
    return [s for s in range(-(-first // step) * step, last + 1, step)] or [first]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _mark(x: float, y: float, line: Line) -> str:
    if line.look == "diamond":
        return (
            f'<rect class="open c{line.color}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" '
            f'height="8" transform="rotate(45 {x:.1f} {y:.1f})"/>'
        )
    return f'<circle class="disc c{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _legend(lines: Sequence[Line]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 24 12">{_sample(line)}</svg>{escape(line.label)}</li>'
        for line in lines
    )
    return f"<ul>{items}</ul>"


def _sample(line: Line) -> str:
    if line.look in ("disc", "diamond"):
        return _mark(12, 6, line)
    return f'<polyline class="{line.look} c{line.color}" points="1,6 23,6"/>'


def epoch_starts(steps: Sequence[int], epochs: Sequence[int]) -> list[tuple[int, int]]:
    """The first step of every epoch, and its number."""
    pairs: Any = list(zip(steps, epochs, strict=True))
    return [*pairs[:1], *(b for a, b in pairwise(pairs) if a[1] != b[1])]


STYLE = """
figure { margin: 0; position: relative; }
svg.chart { display: block; width: 100%; height: auto; touch-action: pan-y; }
svg text { fill: var(--muted); font: 12px system-ui, sans-serif; }
@media (max-width: 30rem) { svg.chart text { font-size: 17px; } }
@media (min-width: 50rem) { svg.chart text { font-size: 8.5px; } }
svg.wide { display: block; width: 100%; height: auto; min-width: 38rem; }
svg.wide text { font-size: 9px; }
.grid { stroke: var(--line); } .epoch { stroke: var(--line); stroke-dasharray: 2 3; }
.level { stroke: var(--muted); stroke-dasharray: 1 4; } .cross { stroke: var(--muted); }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.thin { stroke-width: 1; opacity: .4; } polyline.dash { stroke-dasharray: 6 4; }
.disc { stroke: none; } .open { fill: var(--card); stroke-width: 1.6; }
figure ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .4rem 0 0;
  padding: 0; font-size: .85rem; color: var(--muted); }
figure ul svg { width: 24px; height: 12px; margin-right: .4rem; }
output { display: block; min-height: 1.4em; font-size: .85rem; font-variant-numeric: tabular-nums; }
""" + "".join(
    f"polyline.c{i}, .open.c{i} {{ stroke: var(--c{i}); }} .disc.c{i} {{ fill: var(--c{i}); }}\n"
    for i in range(6)
)

SCRIPT = """
for (const svg of document.querySelectorAll("svg.chart")) {
  const chart = JSON.parse(svg.dataset.chart), cross = svg.querySelector(".cross");
  const text = svg.parentElement.querySelector("output");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    let best = 0;
    chart.x.forEach((at, i) => { if (Math.abs(at - x) < Math.abs(chart.x[best] - x)) best = i; });
    cross.setAttribute("x1", chart.x[best]); cross.setAttribute("x2", chart.x[best]);
    cross.setAttribute("visibility", "visible"); text.textContent = chart.t[best];
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden"); text.textContent = "";
  });
}
"""
