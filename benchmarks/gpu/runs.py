"""Whole runs of `thinpipe train` whose ranks share a GPU: which there are, and what each showed."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from thinpipe.launch.view.report.metrics import read_metrics

_RAW = {"kind": "raw", "format": "fp32"}
_TRANSFORM = {"kind": "transform", "step": 0.7}
_BOUNDARIES = {
    "raw": {"forward": _RAW, "backward": _RAW},
    "AQ-SGD": {
        "forward": {"kind": "aqsgd", "bits": 3},
        "backward": {"kind": "direct", "bits": 6},
    },
    "transform": {"forward": _TRANSFORM, "backward": _TRANSFORM},
}


@dataclass(frozen=True)
class Case:
    """A run: its stages and what crosses their cuts."""

    name: str
    stages: int = 1
    boundary: str = "raw"
    tier: str = "ram"
    precision: str = "fp32"


LOOPBACK = (
    Case("1 stage"),
    Case("4 stages, raw", 4),
    Case("4 stages, AQ-SGD, ram", 4, "AQ-SGD"),
    Case("4 stages, AQ-SGD, device", 4, "AQ-SGD", "device"),
    Case("4 stages, AQ-SGD, pinned", 4, "AQ-SGD", "pinned"),
    Case("2 stages, raw", 2),
    Case("4 stages, transform", 4, "transform"),
    Case("1 stage, bf16", precision="bf16"),
    Case("4 stages, AQ-SGD, bf16", 4, "AQ-SGD", precision="bf16"),
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
            "memory": {"tier": case.tier if device == "cuda" else "ram"},
            "train": {"epochs": self.epochs, "batch_size": self.batch, "lr": 3e-4},
            "eval": {"every_epochs": self.epochs},
            "checkpoint": {"every_epochs": self.epochs},
        }
        if cuts:
            found["boundary"] = [_BOUNDARIES[case.boundary]]
        return tomlkit.dumps(found)


@dataclass(frozen=True)
class Row:
    """What a run showed: seconds are the median of a step, bytes those of its last one."""

    case: str
    step_s: float
    nbytes: int
    losses: Sequence[float]

    @classmethod
    def read(cls, case: str, folder: Path, warm: int) -> "Row":
        """From the folder of a run that ended.

        Raises:
            OSError, ValueError: it has no metrics, or too few steps.
        """
        steps = read_metrics(folder / "metrics.jsonl")
        if len(steps) <= warm:
            raise ValueError(f"{folder}: {len(steps)} steps, of which {warm} are not timed")
        return cls(
            case,
            statistics.median(step.step_s for step in steps[warm:]),
            sum(total.nbytes for total in steps[-1].wire),
            [step.loss for step in steps],
        )


def apart(rows: Mapping[str, Row], one: str, other: str) -> float:
    """Largest difference of two runs' losses; NaN where one is missing."""
    if one not in rows or other not in rows:
        return float("nan")
    pairs = zip(rows[one].losses, rows[other].losses, strict=True)
    return max(abs(a - b) for a, b in pairs)
