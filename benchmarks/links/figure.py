"""The figure of the link benchmark: speed of every method at every rate, with its bound."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.links.rows import Row
from thinpipe.launch.host.links import format_rate

_BAR = 0.8
_THEIRS = ("#b5b5b5", "#8f8f8f", "#cfc3ae", "#a3957c")
_OURS = ("#9ecae1", "#6baed6", "#3182bd", "#31a354", "#006d2c")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: one panel for each number of stages and delay.

    Bars are measured speeds, black marks the bounds of the schedules.
    """
    panels = sorted({(row.stages, row.delay_s) for row in rows})
    figure = Figure(figsize=(10, 4.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    for panel, (stages, delay_s) in zip(axes, panels, strict=True):
        _panel(panel, [row for row in rows if (row.stages, row.delay_s) == (stages, delay_s)])
        panel.set_title(f"{stages} stages, {delay_s * 1e3:g} ms one way", loc="left")
    axes[0].legend(fontsize=8, ncols=3, loc="upper left")
    figure.savefig(path, dpi=100)


def _panel(panel: Axes, rows: Sequence[Row]) -> None:
    rates = sorted({row.rate_bps for row in rows}, key=lambda rate: rate or float("inf"))
    methods = list(dict.fromkeys(row.method for row in rows))
    theirs = [method for method in methods if method.startswith("torch")]
    ours = [method for method in methods if method not in theirs]
    colors = dict(zip(theirs, _THEIRS, strict=False)) | dict(zip(ours, _OURS, strict=False))
    width = _BAR / len(methods)
    for number, method in enumerate([*theirs, *ours]):
        shown = [row for row in rows if row.method == method]
        places = [rates.index(row.rate_bps) + (number + 0.5) * width - _BAR / 2 for row in shown]
        speeds = [row.tokens_per_s for row in shown]
        panel.bar(places, speeds, 0.92 * width, color=colors[method], label=method)
        reach = [row.tokens_per_s / row.bound_fraction for row in shown]
        label = "bound of the schedule" if number == len(methods) - 1 else None
        panel.plot(places, reach, "k_", markersize=9, label=label)
    panel.set_xticks(range(len(rates)), [format_rate(rate) for rate in rates])
    panel.set_ylabel("tokens per second")
    panel.set_ylim(0, 1.45 * max(row.tokens_per_s / row.bound_fraction for row in rows))
    panel.spines[["top", "right"]].set_visible(False)
