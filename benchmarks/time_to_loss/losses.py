"""Real runs: `thinpipe train` with all ranks on this machine, for losses by step.

Messages, codecs and numbers are those of a run over a network; time is over emulated links alone.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import tomlkit

from benchmarks.harness import card
from benchmarks.time_to_loss.tasks import LAYOUTS, METHODS, LayoutName, Task
from thinpipe.launch.view.report.metrics import StepRecord, read_metrics


def run_file(
    task: Task, layout: LayoutName, method: str, *, texts: tuple[Path, Path], seed: int, lr: float
) -> dict[str, Any]:
    """The sections of a run."""
    common, how = task.settings(*texts), LAYOUTS[layout]
    return {
        **common,
        "run": {"seed": seed},
        "pipeline": {**how.settings(task), "device": "auto"},
        "train": {**common["train"], "lr": lr},
        "checkpoint": {"every_epochs": task.epochs + 1, "keep": 1},
        **METHODS[layout][method],
    }


def measure(
    task: Task, layout: LayoutName, method: str, *, texts: tuple[Path, Path], seed: int, lr: float
) -> dict[str, Any]:
    """A row: losses and bytes of every step, held-out losses of every epoch; errors as `train`."""
    settings = run_file(task, layout, method, texts=texts, seed=seed, lr=lr)
    with TemporaryDirectory() as folder:
        records = train(settings, Path(folder))
    return {
        "task": task.name,
        "layout": layout,
        "method": method,
        "seed": seed,
        "lr": lr,
        "steps": len(records),
        **_numbers(records),
        "card": card(),
    }


def compare(
    task: Task, layout: LayoutName, method: str, rate: str, *, texts: tuple[Path, Path]
) -> dict[str, Any]:
    """A row: seconds of a run over links of that rate, and as composed from a short run's steps."""
    runs, how = [], LAYOUTS[layout]
    hosts = how.stages * how.replicas * how.shards
    over = ("shaped", "--hosts", str(hosts), "--rate", rate, "--")
    for steps in (8, 100):
        part = replace(task, sequences=steps * task.batch, epochs=2)
        settings = run_file(part, layout, method, texts=texts, seed=0, lr=task.lr)
        with TemporaryDirectory() as folder:
            runs.append(train(settings, Path(folder), *over))
    typical = {n: median(r.step_s for r in runs[0] if r.epoch == n) for n in (1, 2)}
    whole, composed = sum(r.step_s for r in runs[1]), sum(typical[r.epoch] for r in runs[1])
    return {"seconds": whole, "composed": composed}


def train(settings: dict[str, Any], folder: Path, *over: str) -> list[StepRecord]:
    """Run a file, `over` a network, and read what it measured.

    Raises:
        RuntimeError: the run failed, or skipped a step.
    """
    place = {**settings["run"], "folder": str(folder / "run")}
    file = folder / "run.toml"
    file.write_text(tomlkit.dumps({**settings, "run": place}), encoding="utf-8")
    thinpipe = [sys.executable, "-P", "-m", "thinpipe.launch"]
    command = [*thinpipe, *over, *(thinpipe if over else ()), "train", str(file)]
    done = subprocess.run([*command, "--show", "-1"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    records = read_metrics(folder / "run/metrics.jsonl")
    skipped = [record.step for record in records if record.skipped]
    if skipped:
        raise RuntimeError(f"steps {skipped} were skipped; lower the learning rate")
    return records


def _numbers(records: Sequence[StepRecord]) -> dict[str, Any]:
    held_out = [(record.step, record.eval["loss"]) for record in records if record.eval is not None]
    return {
        "losses": [round(record.loss, 5) for record in records],
        "held_out": held_out,
        "final": held_out[-1][1],
        "cut_bytes": [sum(total.nbytes for total in record.wire) for record in records],
        "sync_bytes": [record.sync_bytes for record in records],
        "shard_bytes": [record.weight_bytes + record.gradient_bytes for record in records],
        "seconds": sum(record.step_s for record in records),
    }
