"""Whole runs of `thinpipe train` whose ranks share a GPU: which there are, and what each showed."""

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from benchmarks.harness import Row
from thinpipe.launch.view.report.metrics import read_metrics

_RAW = {"kind": "raw", "format": "fp32"}
_BF16 = {"kind": "raw", "format": "bf16"}
_TRANSFORM = {"kind": "transform", "step": 0.7}
_BOUNDARIES = {
    "raw": {"forward": _RAW, "backward": _RAW},
    "raw bf16": {"forward": _BF16, "backward": _BF16},
    "AQ-SGD": {
        "forward": {"kind": "aqsgd", "bits": 3},
        "backward": {"kind": "direct", "bits": 6},
    },
    "transform": {"forward": _TRANSFORM, "backward": _TRANSFORM},
}


@dataclass(frozen=True)
class Case:
    """A run: its stages and what crosses their cuts, on links of that rate."""

    name: str
    stages: int = 1
    boundary: str = "raw"
    precision: str = "fp32"
    rate: str | None = None


LOOPBACK = (
    Case("1 stage"),
    Case("4 stages, raw", 4),
    Case("4 stages, AQ-SGD", 4, "AQ-SGD"),
    Case("2 stages, raw", 2),
    Case("4 stages, transform", 4, "transform"),
    Case("1 stage, bf16", precision="bf16"),
    Case("4 stages, AQ-SGD, bf16", 4, "AQ-SGD", precision="bf16"),
)
SHAPED = tuple(
    Case(f"{rate}, {boundary}", 4, boundary, rate=rate)
    for boundary in ("raw bf16", "AQ-SGD", "transform", "raw")
    for rate in ("100mbit", "1gbit")
)


@dataclass(frozen=True)
class Shape:
    """Size of the model and of its batches."""

    layers: int = 12
    width: int = 768
    tokens: int = 256
    batch: int = 16
    samples: int = 48
    epochs: int = 4

    @property
    def warm(self) -> int:
        """Steps that are not timed: kernels are compiled, and samples are sent as first visits."""
        return 2 * self.samples // self.batch

    def run_file(self, case: Case, device: str) -> str:
        """The case as TOML."""
        cuts = [self.layers * stage // case.stages for stage in range(1, case.stages)]
        found: dict[str, Any] = {
            "model": {
                "layers": self.layers,
                "width": self.width,
                "heads": max(1, self.width // 64),
                "context": self.tokens,
            },
            "data": {
                "sequence_length": self.tokens,
                "train_sequences": self.samples,
                "eval_sequences": self.batch,
            },
            "pipeline": {
                "cuts": cuts,
                "microbatches": self.batch // 2,
                "device": device,
                "precision": case.precision,
            },
            "train": {"epochs": self.epochs, "batch_size": self.batch, "lr": 3e-4},
            "eval": {"every_epochs": self.epochs},
            "checkpoint": {"every_epochs": self.epochs},
        }
        if cuts:
            found["boundary"] = [_BOUNDARIES[case.boundary]]
        return tomlkit.dumps(found)

    def command(self, case: Case, file: Path, folder: Path) -> list[str]:
        """What runs it."""
        thinpipe = [sys.executable, "-m", "thinpipe.launch"]
        train = [*thinpipe, "train", str(file), "--set", f"run.folder={folder}"]
        if case.rate is None:
            return train
        hosts = ["--hosts", str(case.stages), "--rate", case.rate]
        return [*thinpipe, "shaped", *hosts, "--", *train]


def read_run(case: str, folder: Path, shape: Shape) -> Row:
    """What a run showed that ended: the median of its steps, and megabytes of its last one.

    Raises:
        OSError, ValueError: it has no metrics, or too few steps.
    """
    steps = read_metrics(folder / "metrics.jsonl")
    if len(steps) <= shape.warm:
        raise ValueError(f"{folder}: {len(steps)} steps, of which {shape.warm} are not timed")
    step_s = statistics.median(step.step_s for step in steps[shape.warm :])
    numbers = {
        "step s": step_s,
        "tokens/s": shape.batch * shape.tokens / step_s,
        "MB/step": sum(total.nbytes for total in steps[-1].wire) / 1e6,
        "last loss": steps[-1].loss,
    }
    return Row(case, numbers, detail={"losses": [step.loss for step in steps]})


def apart(rows: Mapping[str, Row], one: str, other: str) -> float:
    """Largest difference of two runs' losses; NaN where one is missing."""
    if one not in rows or other not in rows:
        return float("nan")
    pairs = zip(rows[one].detail["losses"], rows[other].detail["losses"], strict=True)
    return float(max(abs(a - b) for a, b in pairs))
