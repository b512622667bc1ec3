"""Table (Markdown) and plot of the convergence benchmark.

    python -m benchmarks.fidelity.report out.jsonl more.jsonl --plot out.png

Results of several files are merged; every seed needs its baseline.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness import Row, read_results, summary
from benchmarks.theme import GRID, INK, MUTED, SERIES

BASELINE = "fp32"
LOSSES = ("loss", "held out", "held out, compressed")
_COLUMNS = {
    "bits forward": ".2f",
    "bits backward": ".2f",
    "x fp32": ".1f",
    "x fp32, whole run": ".1f",
    "loss": ".4f",
    **{f"{name} gap": "+.4f" for name in LOSSES},
    "MB of epoch 1": ".1f",
    "MB of the last": ".1f",
    "change, epoch 2": ".3f",
    "change, last": ".3f",
}
_STYLES = {"aq": "-", "auto": "-", "direct": "--", "stateless": "-."}


def table(rows: Sequence[Row]) -> str:
    """Losses are in nats, of training in the last epoch; `gap` is to the baseline's.

    Bits are per value in all epochs but the first, headers included, and so is `x fp32`: how many
    times fewer bytes. Other metrics are those of held-out samples.
    """
    known = {*_COLUMNS, *LOSSES, "before"}
    scores = {name: ".3f" for row in rows for name in row.numbers if name not in known}
    return summary(rows, _COLUMNS | scores)


def read_rows(path: Path) -> list[Row]:
    """What --json wrote."""
    return [Row(**result) for result in read_results(path)]


def _epoch_losses(rows: Sequence[Row], method: str) -> list[list[float]]:
    """By epoch, of every seed."""
    found = [row.detail["epochs"] for row in rows if row.method == method]
    return [[epoch["loss"] for epoch in epochs] for epochs in zip(*found, strict=True)]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Training loss by epoch, and its difference to fp32: median and range over the seeds."""
    figure = Figure(figsize=(10.0, 3.8), dpi=110, layout="constrained")
    absolute, relative = figure.subplots(1, 2)
    base = _epoch_losses(rows, BASELINE)
    for method in dict.fromkeys(row.method for row in rows):
        losses = _epoch_losses(rows, method)
        _draw_lines(absolute, losses, method)
        if method != BASELINE:
            pairs = zip(losses, base, strict=True)
            gaps = [[a - b for a, b in zip(own, its, strict=True)] for own, its in pairs]
            _draw_lines(relative, gaps, method)
    absolute.set_ylabel("training loss [nats/byte]")
    relative.set_ylabel("difference to fp32 of the same seed")
    relative.set_yscale("symlog", linthresh=0.01)
    relative.axhline(0.0, color=INK, linewidth=0.8)
    for axes in (absolute, relative):
        axes.set_xlabel("epoch")
        axes.grid(color=GRID)
    figure.legend(*absolute.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path)


def _draw_lines(axes: Axes, values: Sequence[Sequence[float]], method: str) -> None:
    color, style = _look(method)
    numbers = range(1, len(values) + 1)
    axes.plot(numbers, [median(v) for v in values], style, color=color, label=method, linewidth=1.4)
    low, high = [min(v) for v in values], [max(v) for v in values]
    axes.fill_between(numbers, low, high, color=color, alpha=0.15, linewidth=0)


def _look(method: str) -> tuple[str, str]:
    """Colour by bits, one for all rates; line style by kind."""
    kind = method.split()[0]
    if kind not in _STYLES:
        return (INK if method == BASELINE else MUTED), "-"
    bits = ("fw4", "fw3", "fw2", "fw6", "rate")
    color = next(c for b, c in zip(bits, SERIES, strict=False) if b in method)
    return color, ":" if "," in method else _STYLES[kind]


def main(arguments: Sequence[str] | None = None) -> None:
    """Table and picture of rows that were recorded before, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.report")
    parser.add_argument("records", type=Path, nargs="+", help="files that --json wrote")
    parser.add_argument("--methods", nargs="+", help="to draw (default all)")
    parser.add_argument("--plot", type=Path, help="PNG of the training loss by epoch")
    options: Any = parser.parse_args(arguments)
    rows = [row for path in options.records for row in read_rows(path)]
    print(table(rows))
    if options.plot is not None:
        draw([r for r in rows if not options.methods or r.method in options.methods], options.plot)


if __name__ == "__main__":
    main()
