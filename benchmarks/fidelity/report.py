"""Table (Markdown) of the convergence benchmark.

    python -m benchmarks.fidelity.report out.jsonl more.jsonl

Results of several files are merged; every seed needs its baseline.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, read_results, summary

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Table of rows that were recorded before, from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.report")
    parser.add_argument("records", type=Path, nargs="+", help="files that --json wrote")
    options: Any = parser.parse_args(arguments)
    print(table([row for path in options.records for row in read_rows(path)]))


if __name__ == "__main__":
    main()
