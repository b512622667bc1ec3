"""Faults in whole runs: a rank or its supervisor killed, a rank stopped for a while.

Each run restarts by itself and must end with the losses, and the checkpoint's digests, of the run
that nothing disturbed.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.chaos.outcome import Outcome, Verdict
from thinpipe.launch.checkpoint.files import read_manifest
from thinpipe.launch.report.metrics import read_metrics

_LIMIT_S = 120.0
_FAULTS_PER_RUN = 10
_KINDS = ("rank killed", "rank killed", "supervisor killed", "rank stopped for 1 s")
_LAYOUTS = {
    "3 stages": ["pipeline.cuts=[1,3]"],
    "2 x 2, cocktail": ["pipeline.cuts=[2]", "pipeline.replicas=2", "gradcomp.method=cocktail"],
}
_CONFIG = """
[model]
layers = 4
width = 16
heads = 2
context = 32
[data]
path = "{text}"
sequence_length = 32
train_sequences = 48
eval_sequences = 8
[pipeline]
cuts = [1, 3]
microbatches = 2
device = "cpu"
[[boundary]]
forward = {{ kind = "aqsgd", bits = 3 }}
backward = {{ kind = "direct", bits = 6, rounding = "stochastic" }}
[train]
epochs = 12
batch_size = 8
warmup_steps = 2
verify_every = 5
[eval]
every_epochs = 1000
[checkpoint]
every_steps = 2
keep = 2
"""


def inject(folder: Path, count: int, seed: int) -> list[Outcome]:
    """Disturb runs `count` times, in both layouts by turns."""
    text = folder / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(4000)))
    (folder / "run.toml").write_text(_CONFIG.format(text=text))
    chance, outcomes, left = random.Random(seed), list[Outcome](), count
    expected = {name: _Run(folder, f"calm{i}", name).finish() for i, name in enumerate(_LAYOUTS)}
    number = 0
    while left > 0:
        name = list(_LAYOUTS)[number % len(_LAYOUTS)]
        faults = min(left, _FAULTS_PER_RUN)
        run = _Run(folder, f"run{number}", name)
        found = [_disturb(run, chance) for _ in range(faults)]
        ended = run.finish()
        if ended != expected[name]:
            verdict: Verdict = "silent" if ended[0] == 0 else "lost"
            said = f"{name}: {run.log.read_text()[-2000:]}"
            found = [Outcome(fault.kind, verdict, said) for fault in found]
        outcomes += found
        left, number = left - faults, number + 1
    return outcomes


class _Run:
    """A run that restarts by itself."""

    def __init__(self, folder: Path, name: str, layout: str) -> None:
        self.folder, self.log = folder / name, folder / f"{name}.log"
        settings = [f"run.folder={self.folder}", *_LAYOUTS[layout]]
        words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(folder / "run.toml")]
        words += ["--max-restarts", "99"]
        words += [word for setting in settings for word in ("--set", setting)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def steps(self) -> int:
        """Steps in the metrics so far."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def processes(self, what: str) -> list[psutil.Process]:
        """Its processes of this name."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        named = [(child, child.name()) for child in children if child.is_running()]
        return [child for child, name in named if name.startswith(f"thinpipe {what}")]

    def ranks(self) -> list[psutil.Process]:
        """Its ranks."""
        return [rank for number in range(4) for rank in self.processes(str(number))]

    def finish(self) -> tuple[int, list[float], list[str]]:
        """Exit code, losses, digests of the last checkpoint's parts."""
        code = self.process.wait(600)
        losses = [record.loss for record in read_metrics(self.folder / "metrics.jsonl")]
        manifest = read_manifest(self.folder / "checkpoints" / f"step-{len(losses)}")
        return code, losses, [part.sha256 for part in manifest.parts]


def _wait(run: _Run, condition: object) -> None:
    limit_s = time.monotonic() + _LIMIT_S
    while not condition() and run.process.poll() is None:  # type: ignore[operator]
        if time.monotonic() > limit_s:
            run.process.kill()
            raise TimeoutError(run.log.read_text())
        time.sleep(0.01)


def _disturb(run: _Run, chance: random.Random) -> Outcome:
    start = run.steps()
    _wait(run, lambda: run.steps() >= start + chance.choice((1, 2, 3)) and run.ranks())
    time.sleep(chance.random() * 0.2)
    kind = chance.choice(
        ("rank killed", "rank killed", "supervisor killed", "rank stopped for 1 s")
    )
    try:
        victims = run.processes("wait") if kind == "supervisor killed" else run.ranks()
        victim = chance.choice(victims)
        began_s = time.monotonic()
        if kind == "rank stopped for 1 s":
            victim.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            victim.send_signal(signal.SIGCONT)
        else:
            victim.send_signal(signal.SIGKILL)
    except (psutil.NoSuchProcess, IndexError):  # the run was at its end
        return Outcome("none: the run had ended", "survived")
    if "killed" in kind:
        _wait(run, lambda: _restarted(run, victim))
    before = run.steps()
    _wait(run, lambda: run.steps() > before)
    return Outcome(kind, "survived", seconds=time.monotonic() - began_s)


def _restarted(run: _Run, victim: psutil.Process) -> bool:
    return not victim.is_running() and bool(run.ranks())
