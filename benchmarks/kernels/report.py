"""Tables and the picture of `benchmarks.kernels` from its JSON lines.

python -m benchmarks.kernels.report kernels.jsonl --figure kernels.png
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.harness import format_table, read_results
from benchmarks.kernels.run import SIZES, Row

_SIZE_NAMES = {values: name for name, values in SIZES.items()}


def load(paths: Sequence[Path]) -> list[Row]:
    """The measurements of files; several of one kind become their median by speed."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in (Row(**result) for path in paths for result in read_results(path)):
        key = (row.kernel, row.backend, row.bits, row.rounding, row.elements, row.threads)
        found.setdefault(key, []).append(row)
    middle = statistics.median_low
    return [
        next(row for row in rows if row.melem_s == middle(r.melem_s for r in rows))
        for rows in found.values()
    ]


def own_table(rows: Sequence[Row]) -> str:
    """Our kernels by bits, size and threads: million values per second (share of the floor)."""
    own = [row for row in rows if row.backend == "numba"]
    columns = sorted(
        {(row.elements, row.bits, row.threads) for row in own if row.bits <= 8}, reverse=True
    )
    heads = [f"{_SIZE_NAMES.get(n, n)}, {b} bits, {t} thr" for n, b, t in columns]
    names = list(dict.fromkeys((row.kernel, row.rounding) for row in own if row.bits <= 8))
    cells = {
        (row.kernel, row.rounding, row.elements, row.bits, row.threads): (
            f"{row.melem_s:.0f} ({row.share:.2f})"
        )
        for row in own
    }
    lines = [[", ".join(name), *(cells.get((*name, *c), "") for c in columns)] for name in names]
    return format_table(["kernel", *heads], lines)


def backend_table(rows: Sequence[Row], elements: int, bits: int) -> str:
    """All backends at one size, on one thread: million values per second."""
    shown = [
        row
        for row in rows
        if row.elements == elements and row.threads == 1 and row.bits in (bits, 32)
    ]
    backends = list(dict.fromkeys(row.backend for row in shown))
    names = list(dict.fromkeys((row.kernel, row.rounding) for row in shown))
    cells = {(row.kernel, row.rounding, row.backend): f"{row.melem_s:.0f}" for row in shown}
    lines = [[", ".join(name), *(cells.get((*name, b), "") for b in backends)] for name in names]
    labels = ["torch eager" if backend == "reference" else backend for backend in backends]
    return format_table(["kernel", *labels], lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: what one thread reaches from memory at 4 bits, by backend, beside the floor."""
    shown = [row for row in rows if row.threads == 1 and row.bits == 4]
    largest = max(row.elements for row in shown)
    shown = [row for row in shown if row.elements == largest and row.backend != "reference"]
    names = list(dict.fromkeys((row.kernel, row.rounding) for row in shown))
    backends = list(dict.fromkeys(row.backend for row in shown))
    figure = Figure(figsize=(10, 0.5 * len(names) + 1), layout="constrained")
    axes, height = figure.subplots(), 0.8 / len(backends)
    for place, name in enumerate(names):
        rows_here = [row for row in shown if (row.kernel, row.rounding) == name]
        for number, row in enumerate(rows_here):
            y = place + (number - (len(rows_here) - 1) / 2) * height
            color = f"C{backends.index(row.backend)}"
            axes.barh(y, row.melem_s, 0.9 * height, color=color)
        own = next(row for row in rows_here if row.backend == backends[0])
        axes.plot(own.floor_melem_s, place, "k|", markersize=14)
    axes.plot([], [], "k|", markersize=10, label="floor: bytes moved, no arithmetic")
    for number, backend in enumerate(backends):
        axes.barh(0, 0, color=f"C{number}", label=backend)
    axes.set_yticks(range(len(names)), [", ".join(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("million values per second, one thread")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=100)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", type=Path, nargs="+", help="files that --json wrote")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    rows = load(options.rows)
    print(own_table(rows))
    compared = {(row.elements, row.bits) for row in rows if row.backend == "reference"}
    for elements, bits in sorted(compared):
        print(f"\n{elements} values, {bits} bits\n\n{backend_table(rows, elements, bits)}")
    if options.figure:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
