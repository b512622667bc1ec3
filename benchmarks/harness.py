"""Shared by benchmarks: options, environment of a measurement, JSON lines, quantiles, tables."""

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
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


def card() -> str | None:
    """Name of the GPU that a run would use."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def command_line(module: str, description: str | None) -> argparse.ArgumentParser:
    """A command line of `python -m module`, with `--json`."""
    found = argparse.ArgumentParser(
        f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--json", type=Path, metavar="FILE", help="new file: a JSON line per row")
    return found


def parse_options(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    switch: str,
    defaults: Mapping[str, Any],
) -> argparse.Namespace:
    """Parse a command line with a switch that stands for other defaults, and say which.

    Options given with the switch hold.
    """
    flags = ", ".join(f"--{name} {_words(value)}" for name, value in defaults.items())
    parser.add_argument(f"--{switch}", action="store_true", help=f"{flags}, but for what is given")
    options = parser.parse_args(arguments)
    if getattr(options, switch):
        usual = {name: parser.get_default(name) for name in defaults}
        parser.set_defaults(**defaults)
        options = parser.parse_args(arguments)
        for name in defaults:
            value = getattr(options, name)
            instead = "" if usual[name] in (None, value) else f" instead of {_words(usual[name])}"
            print(f"--{switch}: {name} = {_words(value)}{instead}", flush=True)
    return options


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def with_baseline(methods: Iterable[str], baseline: str) -> list[str]:
    """What is measured: the methods that were asked for, behind the one that they are compared to.

    Says so if that was not asked for.
    """
    wanted = list(dict.fromkeys(methods))
    if baseline not in wanted:
        print(f"{baseline} is measured too: the others are compared with it", flush=True)
    return list(dict.fromkeys([baseline, *wanted]))


@dataclass(frozen=True)
class Row:
    """One measurement of a method. Rows of the same method and conditions differ by their seed.

    `numbers` are None where they do not apply. `detail` is for JSON lines alone.
    """

    method: str
    numbers: Mapping[str, float | None]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        about = {**self.conditions, "seed": self.seed}
        measured = {name: f"{x:.6g}" for name, x in self.numbers.items() if x is not None}
        words = [f"{name} {value}" for name, value in {**about, **measured}.items()]
        return f"{self.method}: {', '.join(words)}"


def with_gaps(row: Row, rows: Iterable[Row], baseline: str, names: Sequence[str]) -> Row:
    """The row with `<name> gap`: differences to the baseline's, like it in conditions and seed."""
    base = next(
        other
        for other in (*rows, row)
        if (other.method, other.seed, other.conditions) == (baseline, row.seed, row.conditions)
    )
    gaps: dict[str, float | None] = {}
    for name in names:
        own, its = row.numbers[name], base.numbers[name]
        gaps[f"{name} gap"] = None if own is None or its is None else own - its
    return replace(row, numbers={**row.numbers, **gaps})


def summary(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A line per method and conditions: medians over seeds, and the range of what may be negative.

    `columns` are numbers and how they are written, as in format(); None of all rows: no column.
    """
    names = [name for name in columns if any(row.numbers.get(name) is not None for row in rows)]
    conditions = list(rows[0].conditions)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.method, *row.conditions.values()), []).append(row)
    lines = []
    for (method, *about), found in groups.items():
        cells = [_spread([row.numbers.get(name) for row in found], columns[name]) for name in names]
        lines.append([method, *map(str, about), str(len(found)), *cells])
    return format_table(["method", *conditions, "seeds", *names], lines)


PREDICTED = {"predicted s": ".3f", "measured s": ".3f", "error": "+.1%"}


def prediction_numbers(predicted_s: float, steps_s: Sequence[float]) -> dict[str, float | None]:
    """A predicted step against the median of measured ones, if there are any: `PREDICTED`."""
    measured_s = statistics.median(steps_s) if steps_s else None
    error = predicted_s / measured_s - 1 if measured_s else None
    return {"predicted s": predicted_s, "measured s": measured_s, "error": error}


def _spread(numbers: Sequence[float | None], form: str) -> str:
    values = [number for number in numbers if number is not None]
    if not values:
        return "-"
    ends = [format(value, form) for value in (min(values), max(values))]
    middle = format(statistics.median(values), form)
    return f"{middle} ({ends[0]} to {ends[1]})" if "+" in form and ends[0] != ends[1] else middle


class Records:
    """Appends a benchmark's results to a file of JSON lines; without a path they are dropped.

    Every line has `config`, `environment` and `result`, and can be read alone.
    """

    def __init__(self, path: Path | None, *, go_on: bool = False) -> None:
        """`path` must be new or empty, unless this is to `go_on` with its results.

        Raises:
            ValueError: it holds the results of an earlier run.
        """
        self._path, self._environment, self._lock = path, environment(), Lock()
        self.results: list[Mapping[str, Any]] = []
        if path is not None and path.exists() and path.stat().st_size > 0:
            if not go_on:
                raise ValueError(f"{path} already holds results; remove it or name another file")
            self.results += read_results(path)

    def add(self, config: Mapping[str, Any], result: Mapping[str, Any] | Row) -> None:
        """Append one result; the file is complete after every call."""
        found = asdict(result) if isinstance(result, Row) else result
        record = {"config": config, "environment": self._environment, "result": found}
        with self._lock:
            self.results.append(found)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Forget other results."""
        self.results = list(filter(wanted, self.results))
        if self._path is not None and self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            partial = self._path.with_suffix(".partial")
            kept = (line for line in lines if wanted(json.loads(line)["result"]))
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(self._path)  # hours of work may be in it


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results in a file that `Records` wrote."""
    return [json.loads(line)["result"] for line in path.read_text(encoding="utf-8").splitlines()]


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


def write_tokenizer(folder: Path, text: Path, *, vocab: int) -> None:
    """Learn a byte-level BPE of `vocab` tokens, in a folder that `data.tokenizer` can name."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=vocab, show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


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
