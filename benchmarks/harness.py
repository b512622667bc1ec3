"""Shared by benchmarks: options, environment of a measurement, JSON lines, quantiles, tables."""

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from thinpipe.launch.host.packages import versions

_ROOT = Path(__file__).parent.parent


def environment() -> dict[str, Any]:
    """Revision of this repository, versions, hardware and time: part of every record."""
    return {
        "revision": _revision(),
        "versions": versions(),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
        },
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def parse_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    switch: str,
    defaults: Callable[[argparse.Namespace], Mapping[str, Any]],
) -> argparse.Namespace:
    """Parse a command line with a switch that stands for other defaults, and say which.

    What is given beside the switch holds.
    """
    options = parser.parse_args(arguments)
    if getattr(options, switch):
        chosen = defaults(options)
        parser.set_defaults(**chosen)
        options = parser.parse_args(arguments)
        values = ", ".join(f"{name} = {getattr(options, name)}" for name in chosen)
        print(f"--{switch}: {values}", flush=True)
    return options


class Records:
    """Appends a benchmark's results to a file of JSON lines; without a path they are dropped.

    Every line has `config`, `environment` and `result`, and can be read alone.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` must be new or empty.

        Raises:
            ValueError: it holds the results of an earlier run.
        """
        if path is not None and path.exists() and path.stat().st_size > 0:
            raise ValueError(f"{path} already holds results; remove it or name another file")
        self._path, self._environment = path, environment()

    def add(self, config: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Append one result; the file is complete after every call."""
        if self._path is None:
            return
        record = {"config": config, "environment": self._environment, "result": result}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """20, 50 and 80 % quantiles, interpolated between the values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("values = []: quantiles need at least one measurement")
    if len(values) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


def format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table with aligned columns: the first to the left, others to the right.

    Raises:
        ValueError: the number of cells of a row is not that of heads.
    """
    for row in rows:
        if len(row) != len(heads):
            raise ValueError(f"row {list(row)} has {len(row)} cells for {len(heads)} columns")
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    left, *right = ["-" * (width + 1) for width in widths]
    rule = "|" + "|".join([f":{left}", *(f"{dashes}:" for dashes in right)]) + "|"
    return "\n".join([_row(heads, widths), rule, *(_row(row, widths) for row in rows)])


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return "| " + " | ".join(padded) + " |"


def _revision() -> str:
    """Commit, marked dirty if the tree differs from it; "unknown" outside a checkout."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
