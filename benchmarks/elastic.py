"""How long a run stands still when it loses a replica, and its goodput.

    python -m benchmarks.elastic --json out.jsonl

Starts runs of four replicas with `[elastic]`, sends SIGKILL to one rank after another, and reads in
the run's metrics how much longer the steps took in which that happened. Goodput is the share of its
time that a run spends on steps of usual length, between its first step and its last.
"""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from benchmarks.harness import Records, Row, command_line, parse_options, summary
from thinpipe.launch.view.report.metrics import StepRecord, read_metrics

REPLICAS, _PATIENCE_S = 4, 600.0
_COLUMNS = {"stands still s": ".2f", "worst s": ".2f", "usual step s": ".3f", "goodput": ".3f"}
_RUN = """
[run]
folder = "{folder}/run"
[model]
layers = 4
width = 128
[data]
path = "{folder}/text.txt"
train_sequences = {sequences}
eval_sequences = 16
[pipeline]
device = "cpu"
replicas = 4
[train]
epochs = 1
batch_size = 16
[gradcomp]
method = "{method}"
[elastic]
min_replicas = 1
"""


def measure(method: str, seed: int, every: int) -> Row:
    """A run that loses a replica every so many steps, until one is left."""
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(f"{number} squared is {number**2}.\n" for number in range(90_000))
        (Path(folder) / "text.txt").write_text(text, encoding="utf-8")
        file = Path(folder) / "run.toml"
        run_file = _RUN.format(folder=folder, method=method, sequences=40 * every)
        file.write_text(run_file, encoding="utf-8")
        words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(file), "--show", "-1"]
        with subprocess.Popen([*words, "--set", f"run.seed={seed}"]) as run:
            try:
                for number in range(1, REPLICAS):
                    _kill(run, Path(folder), rank=REPLICAS - number, after=number * every)
                if run.wait(_PATIENCE_S):
                    raise RuntimeError(f"the run ended with {run.returncode}")
            finally:
                run.kill()
        records = read_metrics(Path(folder) / "run/metrics.jsonl")
    return _row(method, seed, records)


def _kill(run: "subprocess.Popen[bytes]", folder: Path, *, rank: int, after: int) -> None:
    """SIGKILL, once so many steps are on record."""
    metrics, limit_s = folder / "run/metrics.jsonl", time.monotonic() + _PATIENCE_S
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < after:
        if run.poll() is not None or time.monotonic() > limit_s:
            raise RuntimeError(f"the run ended before step {after}, or did not reach it in time")
        time.sleep(0.02)
    ranks = psutil.Process(run.pid).children(recursive=True)
    (found,) = [process for process in ranks if process.name() == f"thinpipe {rank}"]
    found.send_signal(signal.SIGKILL)


def _row(method: str, seed: int, records: Sequence[StepRecord]) -> Row:
    """Of each loss, the longer of the first step without that replica and the one before."""
    pairs = [*pairwise(records[:-1])]  # the last step may have fewer samples
    struck = [max(pair, key=lambda one: one.step_s) for pair in pairs if _lost(*pair)]
    usual_s = {
        samples: median(one.step_s for one in records if one.samples == samples)
        for samples in {one.samples for one in records}
    }
    still_s = [one.step_s - usual_s[one.samples] for one in struck]
    total_s = sum(record.step_s for record in records)
    numbers: dict[str, float | None] = {
        "stands still s": median(still_s),
        "worst s": max(still_s),
        "usual step s": usual_s[records[0].samples],
        "goodput": 1 - sum(still_s) / total_s,
    }
    detail = {"still_s": still_s, "steps": len(records), "total_s": total_s}
    return Row(method, numbers, seed=seed, detail=detail)


def _lost(before: StepRecord, after: StepRecord) -> bool:
    return (after.samples or 0) < (before.samples or 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    command = command_line("benchmarks.elastic", __doc__)
    command.add_argument("--methods", nargs="+", default=["allreduce", "ef_gradients"])
    command.add_argument("--seeds", type=int, default=5, help="runs of each (default 5)")
    command.add_argument("--every", type=int, default=60, help="steps between losses (default 60)")
    options = parse_options(command, arguments, "quick", {"seeds": 1})
    records, rows = Records(options.json), []
    for method in options.methods:
        for seed in range(options.seeds):
            rows.append(measure(method, seed, options.every))
            print(rows[-1], flush=True)
            records.add({"every": options.every}, rows[-1])
    print(summary(rows, _COLUMNS))


if __name__ == "__main__":
    main()
