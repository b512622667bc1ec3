"""The picture that one posts: loss, bytes saved, machines and what they sent each other."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thinpipe.launch.host.words import format_bytes, format_duration, format_ratio
from thinpipe.launch.view.report.compare import names_of
from thinpipe.launch.view.report.content import Story
from thinpipe.launch.view.report.edges import Edge
from thinpipe.launch.view.report.rows import Rows, smoothed

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d00", "#56b4e9")
_DASHES = ("-", "--", "-.", ":")
_INK, _MUTED = "#1c2128", "#5b6570"
_MOST_NAME = 18  # letters of a host; longer names would run into each other
_FACTS = (0.03, 0.23, 0.51, 0.76)  # where they begin, as parts of the width
_LABEL = {"boxstyle": "round", "fc": "white", "ec": "none", "pad": 0.15}


def draw(runs: Sequence[Story], file: Path) -> None:
    """Write 1200 x 630 pixels: the first run, with the losses of the others for comparison.

    Raises:
        ValueError: matplotlib writes no files of this kind.
    """
    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="#ffffff")
    grid: Any = figure.add_gridspec(
        1, 2, width_ratios=(1.5, 1), left=0.07, right=0.97, top=0.67, bottom=0.09, wspace=0.16
    )
    story = runs[0]
    figure.text(0.03, 0.92, _plain(story.info.name, 48), size=24, weight="bold", color=_INK)
    about = " · ".join(story.info.shape)
    if len(runs) > 1:
        about = f"numbers of this run, losses also of {len(runs) - 1} more · {about}"
    figure.text(0.03, 0.865, _plain(about, 110), size=12, color=_MUTED)
    for x, (value, name) in zip(_FACTS, _facts(story), strict=False):
        figure.text(x, 0.79, value, size=18, weight="bold", color=_COLORS[0])
        figure.text(x, 0.753, name, size=10.5, color=_MUTED)
    _losses(figure.add_subplot(grid[0]), runs)
    _machines(figure.add_subplot(grid[1]), story)
    figure.text(0.97, 0.02, "ThinPipe", size=11, color=_MUTED, ha="right")
    try:
        figure.savefig(file, dpi=100)
    except ValueError as error:
        raise ValueError(f"--share = {file}: {error}; name a file that ends in .png") from None


def _facts(story: Story) -> list[tuple[str, str]]:
    summary = story.summary
    sent, records = summary["totals"], story.records
    found = [(f"{records[-1].step:,} steps", f"in {format_duration(summary['wall_s'])}")]
    if sent["bytes"]:
        ratios = (format_ratio(sent["ratio_fp32"]), format_ratio(sent["ratio_bf16"]))
        saved = format_bytes(sent["fp32_bytes"] - sent["bytes"])
        found += [
            (f"{ratios[0]} less than fp32", f"{ratios[1]} less than bf16, between stages"),
            (f"{saved} saved", f"{format_bytes(sent['bytes'])} sent instead of fp32"),
        ]
    if (loss := (summary["eval"] or {}).get("loss")) is not None:
        found.append((f"{loss:.3f}", "loss on held-out data"))
    return found[:4]


def _losses(axes: Axes, runs: Sequence[Story]) -> None:
    for number, (name, run) in enumerate(zip(names_of([r.info for r in runs]), runs, strict=True)):
        columns = Rows(run.records).columns()
        steps = [math.nan if step is None else step for step in columns["step"]]
        losses = [math.nan if loss is None else loss for loss in columns["loss"]]
        color, dash = _COLORS[number % 6], _DASHES[number % 4]
        reach = len(losses) // 40 + 1
        each = max(1, len(run.records) // len(steps))
        label = f"{_plain(name, 40)} (line fitted to ±{reach * each} steps)"
        axes.plot(steps, smoothed(losses, reach), dash, color=color, lw=2.2, label=label)
        if "eval" in columns:
            marks = [(s, e) for s, e in zip(steps, columns["eval"], strict=True) if e is not None]
            axes.plot(*zip(*marks, strict=True), "osD^"[number % 4], color=color, ms=6)
    axes.set_title("Loss by step; marks are evaluations", loc="left", size=12, color=_INK)
    axes.grid(color="#e3e6ea")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10)


def _machines(axes: Axes, story: Story) -> None:
    axes.set_axis_off()
    axes.set_aspect("equal", adjustable="box", anchor="N")
    edges = story.summary["edges"]
    hosts = list(dict.fromkeys([p["host"] for p in story.places] + _ends(edges)))
    title = "Machines, and what each connection carried" if edges else "Machines"
    axes.set_title(title, loc="left", size=12, color=_INK)
    axes.set(xlim=(-1.7, 1.7), ylim=(-1.55, 1.45))
    turn = 2 * math.pi / max(1, len(hosts))
    places = {
        host: (math.sin(turn * n), math.cos(turn * n)) if len(hosts) > 1 else (0.0, 0.0)
        for n, host in enumerate(hosts)
    }
    carried: dict[frozenset[str], int] = {}
    for edge in edges:
        pair = frozenset((edge["source"], edge["target"]))
        carried[pair] = carried.get(pair, 0) + edge["bytes"]
    most = max(carried.values(), default=1) or 1
    for pair, nbytes in carried.items():
        (x0, y0), (x1, y1) = (places[host] for host in sorted(pair))
        axes.plot([x0, x1], [y0, y1], color=_COLORS[0], lw=1 + 5 * nbytes / most, alpha=0.55)
        if len(hosts) <= 4:
            at = (x0 + 0.36 * (x1 - x0), y0 + 0.36 * (y1 - y0))
            axes.annotate(format_bytes(nbytes), at, size=9, color=_INK, ha="center", bbox=_LABEL)
    for host, (x, y) in places.items():
        stages = sorted({s for p in story.places if p["host"] == host for s in p["stages"]})
        axes.plot([x], [y], "o", ms=15, color=_INK)
        words = _plain(host, _MOST_NAME) + (f"\nstage {', '.join(map(str, stages))}" * bool(stages))
        away = (32 * x, 18 * y if abs(y) > 0.5 else 0) if len(hosts) > 1 else (0, -28)
        axes.annotate(words, (x * 1.08, y * 1.08), away, textcoords="offset points", size=9.5,
                      color=_INK, ha="center", va="center")  # fmt: skip


def _ends(edges: Sequence[Edge]) -> list[str]:
    return [end for edge in edges for end in (edge["source"], edge["target"])]


def _plain(text: str, most: int) -> str:
    """Text that matplotlib does not read as a formula, and that fits."""
    short = text if len(text) <= most else f"{text[: most - 1]}…"
    return short.replace("$", r"\$")
