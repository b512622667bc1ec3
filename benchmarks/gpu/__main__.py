"""Everything that a GPU can show, in one command, within nine minutes.

    python -m benchmarks.gpu --page gpu.md --json gpu.jsonl

The tests marked `gpu`; kernels against the reference and against a copy; pipelines of 2 and 4
stages on one card against one process; memory against its count;
steps over limited links, which needs root. A part that fails is reported and the next one begins.
`--rehearse` runs all of it on the CPU, with a tiny model: no result, but every line of this.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.runs import LOOPBACK, SHAPED, Case, Shape, apart, read_run
from benchmarks.harness import (
    Records,
    Row,
    card,
    command_line,
    environment,
    format_table,
    read_results,
    summary,
)
from thinpipe.launch.host.resources import usable_cores
from thinpipe.launch.host.words import format_bytes

_TESTS_S, _PROGRAM_S, _RUN_S, _LEAST_S = 150, 60, 60, 10
_TINY = Shape(layers=4, width=64, tokens=16, batch=4, samples=8, epochs=3)
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Work:
    """Where a part works, where its numbers go, and until when (`time.perf_counter`) it may."""

    folder: Path
    records: Records
    rehearse: bool
    until: float


class FailedError(Exception):
    """A part did not do its work; the message says why."""


class LateError(Exception):
    """A part was left out, as the time was up."""


def _run(work: Work, command: Sequence[str], limit_s: float) -> str:
    """Output of a command.

    Raises:
        FailedError: it ended with an error, or not in time.
        LateError: there is no time left.
    """
    left_s = work.until - time.perf_counter()
    if left_s < _LEAST_S:
        raise LateError("left out: the time was up")
    limit_s = min(limit_s, left_s)
    try:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"{' '.join(command)}: not done within {limit_s:.0f} s") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-12:]
        raise FailedError("\n".join([f"{' '.join(command)}: exit code {done.returncode}", *said]))
    return done.stdout


def tests(work: Work) -> str:
    """The tests marked `gpu`; a rehearsal has them skipped.

    Raises:
        FailedError: naming those that failed.
    """
    report = work.folder / "tests.xml"
    workers = str(max(2, min(8, usable_cores() // 2)))
    options = ["-m", "gpu", "-n", workers, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    where = ["tests/pipeline"] if work.rehearse else ["tests"]
    try:
        _run(work, [sys.executable, "-m", "pytest", *options, *where], _TESTS_S)
    except FailedError:
        if not report.exists():
            raise
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    failed = [
        f"* {case.get('classname')}::{case.get('name')}: {problem.get('message', '')[:300]}"
        for case in suite.iter("testcase")
        for problem in (*case.iter("failure"), *case.iter("error"))
    ]
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped")}
    work.records.add({"part": "tests"}, {**counts, "failed": failed})
    passed = counts["tests"] - counts["skipped"] - len(failed)
    text = f"{passed} passed, {counts['skipped']} skipped, {len(failed)} failed."
    if failed:
        raise FailedError("\n".join([text, *failed]))
    return text


def kernels(work: Work) -> str:
    """Speed of Triton's kernels; `gpu` tests hold their bits against the reference's."""
    if work.rehearse:
        return "Not on a CPU."
    path = work.folder / "kernels.jsonl"
    sizes = ["--device", "cuda", "--sizes", "64M", "--bits", "2", "4", "8", "--repetitions", "10"]
    _run(
        work,
        [sys.executable, "-m", "benchmarks.kernels", *sizes, "--json", str(path)],
        _PROGRAM_S,
    )
    rows = [Row(**row) for row in read_results(path)]
    rows = [row for row in rows if row.conditions["backend"] == "triton"]
    for row in rows:
        work.records.add({"part": "kernels"}, row)
    return summary(rows, {"GB/s": ",.0f", "of the floor": ".2f"})


def memory(work: Work) -> str:
    """Peaks of training steps against what was counted."""
    if work.rehearse:
        return "Not on a CPU."
    path = work.folder / "memory.jsonl"
    _run(work, [sys.executable, "-m", "benchmarks.gpu.memory", "--json", str(path)], _PROGRAM_S)
    cells = []
    for row in read_results(path):
        work.records.add({"part": "memory"}, row)
        counted, peak = row["numbers"]["counted"], row["numbers"]["peak"]
        off = f"{counted / peak - 1:+.0%}"
        more = [format_bytes(row["numbers"][name]) for name in ("held", "reserved")]
        cells.append([row["method"], format_bytes(counted), format_bytes(peak), off, *more])
    return format_table(["case", "counted", "peak", "error", "held", "reserved"], cells)


_COLUMNS = {"step s": ".3f", "tokens/s": ",.0f", "MB/step": ",.2f", "last loss": ".4f"}


def runs(work: Work, *, cases: Sequence[Case], part: str) -> str:
    """Runs of the command line, one after another.

    Raises:
        FailedError: with what the others showed.
    """
    shape, device = (_TINY, "cpu") if work.rehearse else (Shape(), "cuda")
    rows, problems, late = dict[str, Row](), list[str](), list[str]()
    for number, case in enumerate(cases):
        file, run = work.folder / f"{part}{number}.toml", work.folder / f"{part}{number}"
        file.write_text(shape.run_file(case, device), encoding="utf-8")
        try:
            _run(work, shape.command(case, file, run), _RUN_S)
            rows[case.name] = read_run(case.name, run, shape)
        except LateError as error:
            late.append(f"{case.name}: {error}")
        except (FailedError, OSError, ValueError) as error:
            problems.append(f"**{case.name}**: {error}")
        else:
            work.records.add({"part": part, **asdict(case), **asdict(shape)}, rows[case.name])
            print(rows[case.name], flush=True)
    table = summary([*rows.values()], _COLUMNS) if rows else ""
    text = "\n\n".join(filter(None, [table, *_compared(rows), *late, *problems]))
    if problems:
        raise FailedError(f"{len(problems)} of {len(cases)} runs\n\n{text}")
    return text


def _compared(rows: Mapping[str, Row]) -> list[str]:
    found = []
    for one, other in (
        ("2 stages, raw", "1 stage"),
        ("4 stages, raw", "1 stage"),
    ):
        if one in rows and other in rows:
            found.append(f"{one} and {other}: losses differ by {apart(rows, one, other):.2g}.")
    return found


PARTS: dict[str, Callable[[Work], str]] = {
    "tests": tests,
    "memory": memory,
    "loopback": partial(runs, cases=LOOPBACK, part="loopback"),
    "kernels": kernels,
    "shaped": partial(runs, cases=SHAPED, part="shaped"),
}


def measure(options: argparse.Namespace) -> list[str]:
    """Write the page, anew after each part; returns the parts that failed."""
    records, until = Records(options.json), time.perf_counter() + 60 * options.minutes
    sections, failed = [], []
    for name in options.parts:
        start = time.perf_counter()
        print(f"{name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                text = PARTS[name](Work(Path(folder), records, options.rehearse, until))
            except LateError as error:
                text = str(error)
            except Exception as error:  # the next part may work
                text = f"**Failed**: {type(error).__name__}: {error}"
                failed.append(name)
        sections.append(f"## {name.capitalize()}\n\n{text}\n\n{time.perf_counter() - start:.0f} s.")
        print(f"{sections[-1]}\n", flush=True)
        if options.page:  # now, as borrowed machines are taken back without a word
            page = "\n\n".join([_head(), *sections]) + "\n"
            options.page.write_text(page, encoding="utf-8")
    return failed


def _head() -> str:
    here = environment()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    hardware = f"{here['hardware']['cores']} cores, {here['hardware']['memory_gib']} GiB"
    name = card() or "no GPU: a rehearsal"
    made = f"Made at {here['revision']}, {datetime.now(UTC):%d %B %Y}, by `make gpu`."
    return f"# What a GPU showed: {name}\n\n{made} {versions}; {hardware}."


def page_path() -> Path:
    """`benchmarks/results/gpu_<card>_<yyyymm>.md`."""
    short = "_".join((card() or "none").lower().replace("nvidia", "").split())
    return _ROOT / "benchmarks" / "results" / f"gpu_{short}_{datetime.now(UTC):%Y%m}.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit code is 1 if a part failed."""
    command = command_line("benchmarks.gpu", __doc__)
    command.add_argument("--page", type=Path, help="Markdown file to write; --page auto names it")
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    command.add_argument("--minutes", type=float, default=9.0, help="what is late is left out (9)")
    command.add_argument("--rehearse", action="store_true", help="on the CPU, tiny")
    options = command.parse_args(arguments)
    if options.rehearse and str(options.page) == "auto":
        command.error("--rehearse has no results for --page auto; name a file")
    if not options.rehearse and not torch.cuda.is_available():
        command.error("torch finds no GPU here; --rehearse runs the same on the CPU")
    if str(options.page) == "auto":
        options.page = page_path()
    failed = measure(options)
    if options.page:
        print(f"written: {options.page}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
