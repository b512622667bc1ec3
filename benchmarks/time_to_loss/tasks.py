"""What is trained, in which layouts and by which methods, and on whose GPUs.

Sizes are in sequences and tokens; times of a GPU come from published throughputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Settings = Mapping[str, Any]
"""Sections of a run file."""

LayoutName = Literal[
    "one", "pipeline", "replicas", "8 replicas", "both", "shards", "2 replicas x 2 shards"
]
_REPORTED_PARAMETERS = 124e6
_TOKENS_PER_S = {"A100": 138e3, "RTX 4090": 130e3}
"""Of one card that trains GPT-2 with 124M parameters in bf16: 1.1M tokens/s on eight A100
(D. Saha, "Eight A100s, $61, and 124M parameters", 2026), 130 to 140 thousand on an RTX 4090 (D.
Parker, "NanoGPT-124M in a cave", 2025). Throughput is taken to fall with the number of parameters.
"""
GPUS = tuple(_TOKENS_PER_S)


@dataclass(frozen=True)
class Task:
    """A model that is trained on a text: `sequences` of `tokens`, `batch` per step.

    `parameters` are exchanged; hidden states have `width` channels. `lr` is tried if no other
    learning rates are given.
    """

    name: str
    layers: int
    width: int
    parameters: int
    sequences: int
    epochs: int
    lr: float
    model: Settings
    data: Settings
    tokens: int = 128
    batch: int = 8
    microbatches: int = 4
    held_out: int = 64

    @property
    def steps(self) -> int:
        return self.epochs * (self.sequences // self.batch)

    def cuts(self, stages: int) -> list[int]:
        """The layers shared evenly."""
        return [round(self.layers * stage / stages) for stage in range(1, stages)]

    def compute_s(self, gpu: str) -> float:
        """Seconds of a step on one card."""
        per_token_s = self.parameters / _REPORTED_PARAMETERS / _TOKENS_PER_S[gpu]
        return self.batch * self.tokens * per_token_s

    def settings(self, train: Path, held_out: Path) -> dict[str, Any]:
        """The run file, without layout and method."""
        return {
            "model": dict(self.model),
            "data": {
                "path": str(train),
                "eval_path": str(held_out),
                "sequence_length": self.tokens,
                "train_sequences": self.sequences,
                "eval_sequences": self.held_out,
                **self.data,
            },
            "train": {
                "epochs": self.epochs,
                "batch_size": self.batch,
                "warmup_steps": self.steps // 10,
            },
        }


def smollm2(model: Path, *, share: float = 1.0) -> Task:
    """SmolLM2-135M fine-tuned for three epochs."""
    return Task(
        "smollm2",
        layers=30,
        width=576,
        parameters=134_515_008,
        sequences=8 * round(67 * share),
        epochs=3,
        lr=1e-4,
        model={"pretrained": str(model)},
        data={"tokenizer": "model"},
    )


def gpt2(tokenizer: Path, *, share: float = 1.0) -> Task:
    """A GPT-2 shape of 13.1M parameters from scratch, one epoch."""
    shape = {"layers": 8, "width": 320, "heads": 5, "vocab": 5000, "context": 128}
    return Task(
        "gpt2",
        layers=8,
        width=320,
        parameters=13_107_840,
        sequences=8 * round(320 * share),
        epochs=1,
        lr=1e-3,
        model=shape,
        data={"tokenizer": str(tokenizer)},
    )


@dataclass(frozen=True)
class Layout:
    """How ranks share the model."""

    name: LayoutName
    stages: int = 1
    replicas: int = 1
    shards: int = 1

    def settings(self, task: Task) -> dict[str, Any]:
        return {
            "cuts": task.cuts(self.stages),
            "replicas": self.replicas,
            "shards": self.shards,
            "microbatches": task.microbatches if self.stages > 1 else 1,
        }


LAYOUTS: dict[LayoutName, Layout] = {
    layout.name: layout
    for layout in (
        Layout("one"),
        Layout("pipeline", stages=4),
        Layout("replicas", replicas=4),
        Layout("8 replicas", replicas=8),
        Layout("both", stages=2, replicas=2),
        Layout("shards", shards=4),
        Layout("2 replicas x 2 shards", replicas=2, shards=2),
    )
}


def _cut(forward: Settings, backward: Settings) -> Settings:
    return {"boundary": [{"forward": forward, "backward": backward}]}


def _raw(form: str) -> Settings:
    return _cut({"kind": "raw", "format": form}, {"kind": "raw", "format": form})


def _transform(forward: float, backward: float, **options: Any) -> Settings:
    kind = {"kind": "transform", **options}
    return _cut({**kind, "step": forward}, {**kind, "step": backward})


def _exchange(method: str, **options: Any) -> Settings:
    return {"gradcomp": {"method": method, method: options}}


def _qsdp(**options: Any) -> Settings:
    return {"shards": {"method": "qsdp", **options}}


_AQSGD = _cut({"kind": "aqsgd", "bits": 3}, {"kind": "direct", "bits": 6})
_COCKTAIL = _exchange("cocktail", subset=0.1, topk=0.2, bits=4)
_STREAMING = {"interval": 30, "fragments": 3, "overlap": 5, "mix": 0.5, "bits": 4, "bucket_mb": 2.0}
_REPLICAS: dict[str, Settings] = {
    "fp32": _exchange("allreduce"),
    "bf16": _exchange("allreduce", format="bf16"),
    "PowerSGD rank 1": _exchange("powersgd", rank=1),
    "top-k .008, 4 bits": _exchange("topk", fraction=0.008, bits=4),
    "CocktailSGD": _COCKTAIL,
    "ef_gradients .015": _exchange("ef_gradients"),
    "ef_gradients .03": _exchange("ef_gradients", fraction=0.03),
    "DeMo": _exchange("demo", kept=24),
    "DiLoCo": _exchange("diloco"),
    "streaming DiLoCo": _exchange("diloco", **_STREAMING),
    "SparseLoCo": _exchange("sparse_loco"),
}
METHODS: dict[LayoutName, dict[str, Settings]] = {
    "one": {"fp32": {}},
    "pipeline": {
        "fp32": _raw("fp32"),
        "bf16": _raw("bf16"),
        "AC-SGD 3/6": _cut(
            {"kind": "aqsgd", "bits": 3, "delta": "uniform", "first_visit": "fp32"},
            {"kind": "direct", "bits": 6},
        ),
        "AQ-SGD 3/6": _AQSGD,
        "stateless 5/4": _cut({"kind": "stateless", "bits": 5}, {"kind": "stateless", "bits": 4}),
        "transform .3/.3": _transform(0.3, 0.3),
        "transform .7/.9": _transform(0.7, 0.9),
        "transform .05/.3, no cache": _cut(
            {"kind": "transform", "memory": False, "first_step": 0.05},
            {"kind": "transform", "memory": False, "first_step": 0.3},
        ),
    },
    "replicas": _REPLICAS,
    "8 replicas": _REPLICAS,
    "both": {
        "fp32": {**_raw("fp32"), **_exchange("allreduce")},
        "bf16": {**_raw("bf16"), **_exchange("allreduce", format="bf16")},
        "AQ-SGD 3/6, CocktailSGD": {**_AQSGD, **_COCKTAIL},
        "transform .7/.9, ef_gradients": {**_transform(0.7, 0.9), **_exchange("ef_gradients")},
        "transform .7/.9, SparseLoCo": {**_transform(0.7, 0.9), **_exchange("sparse_loco")},
    },
    "shards": {
        "fp32": {"shards": {"method": "fsdp"}},
        "bf16": {"shards": {"method": "fsdp", "weight_bits": 16, "gradient_bits": 16}},
        "QSDP W8G8": _qsdp(),
        "QSDP W4G4 differences": _qsdp(weights="differences", weight_bits=4, gradient_bits=4),
    },
    "2 replicas x 2 shards": {
        "fp32": {"shards": {"method": "fsdp"}, **_exchange("allreduce")},
        "QSDP W8G8, ef_gradients": {**_qsdp(), **_exchange("ef_gradients")},
        "QSDP W8G8, CocktailSGD": {**_qsdp(), **_COCKTAIL},
    },
}
BASELINE = "fp32"
