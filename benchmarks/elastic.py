"""How long a run stands still when it loses a replica and when one joins, and its goodput.

    python -m benchmarks.elastic --json out.jsonl

Four replicas, each with a launcher of its own, talk over loopback. At intervals one of their ranks
gets SIGKILL, and a while later a replica joins in its place. The run's metrics say how much longer
the steps took in which that happened than others with as many samples. Goodput is the share of time
that the run spends on steps of usual length, from its first step on.
"""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from benchmarks.harness import Records, Row, command_line, parse_options, summary
from thinpipe.launch.view.report.metrics import read_metrics

REPLICAS, _PATIENCE_S, _FIRST_STEPS = 4, 120.0, 20
_COLUMNS = {
    "losses": ".0f",
    "stands still s": ".2f",
    "worst s": ".2f",
    "joins": ".0f",
    "join stands still s": ".2f",
    "join worst s": ".2f",
    "called to joined s": ".1f",
    "usual step s": ".3f",
    "goodput": ".3f",
}
_RUN = """
[run]
folder = "{folder}/run"
[model]
layers = 4
width = 128
[data]
path = "{folder}/text.txt"
train_sequences = 4096
eval_sequences = 16
[pipeline]
device = "cpu"
replicas = 4
[train]
epochs = 1000
batch_size = 16
[eval]
every_epochs = 1000
[checkpoint]
every_epochs = 1000
[gradcomp]
method = "{method}"
[elastic]
min_replicas = 1
"""


class Launchers:
    """A run of four replicas, of which some are lost and others come."""

    def __init__(self, folder: Path, method: str, seed: int) -> None:
        self._file = folder / "run.toml"
        self.metrics, self._log = folder / "run/metrics.jsonl", folder / "log"
        text = "".join(f"{number} squared is {number**2}.\n" for number in range(90_000))
        (folder / "text.txt").write_text(text, encoding="utf-8")
        self._file.write_text(_RUN.format(folder=folder, method=method), encoding="utf-8")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._where = f"127.0.0.1:{probe.getsockname()[1]}"
        self._seed, self._draw = seed, random.Random(seed)
        count = str(REPLICAS)
        self._all = [self._start("--nnodes", count, "--rdzv", self._where) for _ in range(REPLICAS)]
        self.wait_for(_FIRST_STEPS)

    def wait_for(self, steps: int) -> None:
        limit_s = time.monotonic() + _PATIENCE_S
        while not self.metrics.exists() or self.steps < steps:
            if time.monotonic() > limit_s or all(one.poll() is not None for one in self._all):
                raise RuntimeError(f"the run has not done {steps} steps in time, or has ended")
            time.sleep(0.1)

    @property
    def steps(self) -> int:
        return self.metrics.read_bytes().count(b"\n")

    def lose_one(self) -> None:
        """SIGKILL to a rank that is not replica 0's."""
        ranks = [
            process
            for launcher in self._all
            if launcher.poll() is None
            for process in psutil.Process(launcher.pid).children(recursive=True)
            if process.name().startswith("thinpipe ") and process.name()[9:].isdecimal()
        ]
        others = [rank for rank in ranks if str(self.metrics) not in _open_files(rank)]
        if not others:
            raise RuntimeError(f"the run has ended: {self._log.read_text(encoding='utf-8')}")
        self._draw.choice(others).send_signal(signal.SIGKILL)

    def join_one(self) -> float:
        """Seconds until another replica is let in."""
        before, begin_s = len(self.changes("joined")), time.monotonic()
        self._all.append(self._start("--join", self._where))
        while len(self.changes("joined")) == before:
            if time.monotonic() > begin_s + _PATIENCE_S:
                raise RuntimeError(f"nobody joined: {self._log.read_text(encoding='utf-8')}")
            time.sleep(0.1)
        return time.monotonic() - begin_s

    def changes(self, what: str) -> list[int]:
        """Steps after which a replica was "lost" or "joined"."""
        notes = self.metrics.with_name("notes.jsonl").read_text(encoding="utf-8").splitlines()
        found = (json.loads(note) for note in notes)
        return [note["step"] for note in found if note["text"].startswith(f"{what}: ")]

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def end(self) -> None:
        for launcher in self._all:
            launcher.kill()
            launcher.wait()

    def _start(self, *options: str) -> "subprocess.Popen[bytes]":
        words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(self._file)]
        words += [*options, "--show", "-1", "--set", f"run.seed={self._seed}"]
        with self._log.open("ab") as log:
            return subprocess.Popen(words, stdout=log, stderr=log)


def _open_files(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [file.path for file in process.open_files()]
    return []


def measure(method: str, seed: int, losses: int, every_s: float, back_s: float) -> Row:
    """A run that loses a replica at intervals, and gets it back."""
    with tempfile.TemporaryDirectory() as folder:
        run = Launchers(Path(folder), method, seed)
        try:
            called_s = list[float]()
            for _ in range(losses):
                time.sleep(every_s - back_s)
                run.lose_one()
                time.sleep(back_s)
                called_s.append(run.join_one())
            run.wait_for(run.steps + 3)
        finally:
            run.end()
        return _row(method, seed, run, called_s)


def _row(method: str, seed: int, run: Launchers, called_s: Sequence[float]) -> Row:
    """Of each loss and join, the longest of the steps around it."""
    records = read_metrics(run.metrics)
    usual_s = {
        samples: median(one.step_s for one in records if one.samples == samples)
        for samples in {one.samples for one in records}
    }

    def still_s(step: int) -> float:
        around = records[max(0, step - 1) : step + 2]
        return max(one.step_s - usual_s[one.samples] for one in around)

    lost_s, joined_s = ([still_s(step) for step in run.changes(w)] for w in ("lost", "joined"))
    total_s = sum(record.step_s for record in records[_FIRST_STEPS:])
    numbers: dict[str, float | None] = {
        "losses": len(lost_s),
        "stands still s": median(lost_s),
        "worst s": max(lost_s),
        "joins": len(joined_s),
        "join stands still s": median(joined_s) if joined_s else None,
        "join worst s": max(joined_s, default=None),
        "called to joined s": median(called_s),
        "usual step s": usual_s[records[0].samples],
        "goodput": 1 - sum(lost_s + joined_s) / total_s,
    }
    detail = {"lost_s": lost_s, "joined_s": joined_s, "called_s": list(called_s)}
    return Row(method, numbers, seed=seed, detail={**detail, "total_s": total_s})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    command = command_line("benchmarks.elastic", __doc__)
    command.add_argument("--methods", nargs="+", default=["allreduce", "ef_gradients"])
    command.add_argument("--seeds", type=int, default=3, help="runs of each (default 3)")
    command.add_argument("--losses", type=int, default=30, help="in a run (default 30)")
    command.add_argument(
        "--every-s",
        type=float,
        default=30.0,
        help="of a loss and a join, but for what joining takes (default 30)",
    )
    command.add_argument("--back-s", type=float, default=20.0, help="until a join (default 20)")
    options = parse_options(command, arguments, "quick", {"seeds": 1, "losses": 4})
    records, rows = Records(options.json), []
    settings = {name: getattr(options, name) for name in ("losses", "every_s", "back_s")}
    for method in options.methods:
        for seed in range(options.seeds):
            rows.append(measure(method, seed, **settings))
            print(rows[-1], flush=True)
            records.add(settings, rows[-1])
    print(summary(rows, _COLUMNS))


if __name__ == "__main__":
    main()
