"""Pretrain a small decoder, then fine-tune copies of it across compressed cuts, all in one process.

Axes: B samples, T tokens.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fidelity.tah_quant import send_with
from benchmarks.harness import Row, write_tokenizer
from benchmarks.single_process import in_process
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.load import load
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.pipeline.loss import mean_loss
from thinpipe.pipeline.metrics import Measures, named_metrics
from thinpipe.pipeline.models.dropout import DropoutMasks
from thinpipe.pipeline.models.transformer import TransformerConfig, build_layers
from thinpipe.pipeline.step_stats import StepTotals
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.told import Direction

_EVAL_BATCH = 64
_BYTES = 256

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Scale:
    """Size of the experiment; batches are in sequences, learning rates are AdamW's peaks.

    Pretraining has no dropout.
    Tokens are bytes, or with a larger `vocab` subwords, which are learned from the texts. Every
    layer is a stage, unless there are to be fewer `stages`, which share them evenly.
    """

    layers: int = 8
    width: int = 64
    heads: int = 4
    tokens: int = 64
    vocab: int = _BYTES
    pretrain_steps: int = 1200
    pretrain_batch: int = 32
    pretrain_lr: float = 2e-3
    sequences: int = 384
    epochs: int = 6
    batch: int = 16
    microbatches: int = 2
    lr: float = 5e-4
    held_out: int = 512
    dropout: float = 0.0
    dropout_masks: DropoutMasks = "random"
    stages: int | None = None

    @property
    def pretrained(self) -> TransformerConfig:
        """The decoder that is pretrained."""
        return TransformerConfig(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            vocab=self.vocab,
            context=self.tokens,
        )

    @property
    def model(self) -> TransformerConfig:
        """The decoder that is fine-tuned."""
        dropout = {"dropout": self.dropout, "dropout_masks": self.dropout_masks}
        return self.pretrained.model_copy(update=dropout)

    @property
    def data(self) -> DataConfig:
        """Data to fine-tune on, without its path."""
        return DataConfig(
            sequence_length=self.tokens,
            train_sequences=self.sequences,
            eval_sequences=self.held_out,
        )

    def run(self, boundary: Mapping[str, Any], seed: int) -> RunConfig:
        """Fine-tuning with the same boundary at all cuts."""
        each = self.layers // (self.stages or self.layers)
        return RunConfig.model_validate(
            {
                "run": {"seed": seed},
                "model": self.model,
                "data": self.data,
                "pipeline": {
                    "cuts": range(each, self.layers, each),
                    "schedule": "GPipe",
                    "microbatches": self.microbatches,
                },
                "boundary": [boundary],
                "train": {
                    "epochs": self.epochs,
                    "batch_size": self.batch,
                    "lr": self.lr,
                    "warmup_steps": self.sequences // self.batch // 2,
                    "decay": "linear",
                },
            }
        )


@dataclass(frozen=True)
class Epoch:
    """One epoch of fine-tuning. `loss` is the mean over its tokens, in nats, compression on.

    Bytes are counted at the links, headers included; `values` is how many numbers they stand for.
    `change` is how far activations were from AQ-SGD's cached ones, relative to their size: the mean
    over cuts and steps.
    """

    loss: float
    forward_bytes: int
    backward_bytes: int
    values: int
    change: float | None

    @property
    def nbytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Corpus:
    """Three sets of samples that do not overlap."""

    pretrain: SampleSet
    tune: SampleSet
    held_out: SampleSet


def sequences(
    path: Path, scale: Scale, train: int | Literal["all"], held_out: int, **options: Any
) -> tuple[SampleSet, SampleSet]:
    """Cut a text into sequences to train on and, from its end, to hold out."""
    sizes = {"train_sequences": train, "eval_sequences": held_out}
    return load(DataConfig(path=str(path), sequence_length=scale.tokens, **sizes, **options))


def read_corpus(train: Path, evaluation: Path, scale: Scale) -> Corpus:
    """Cut the files into sequences.

    Raises:
        ValueError: a file is missing or too short.
        ImportError: subwords need a package that is not installed.
    """
    with TemporaryDirectory() as folder:
        options = {}
        if scale.vocab > _BYTES:
            both = Path(folder) / "both.txt"
            both.write_bytes(train.read_bytes() + evaluation.read_bytes())
            write_tokenizer(Path(folder), both, vocab=scale.vocab)
            options = {"tokenizer": folder}
        pretrain, tune = sequences(train, scale, "all", scale.sequences, **options)
        held_out, _ = sequences(evaluation, scale, scale.held_out, 1, **options)
        return Corpus(pretrain, tune, held_out)


def pretrain(corpus: Corpus, scale: Scale, *, seed: int) -> Weights:
    """Train the whole model in one piece; its weights by name."""
    model = build_layers(scale.pretrained, 0, scale.layers, seed=seed, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.pretrain_lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=scale.pretrain_lr,
        total_steps=scale.pretrain_steps,
        pct_start=0.05,
        cycle_momentum=False,
    )
    sampler = EpochSampler(
        len(corpus.pretrain), batch_size=scale.pretrain_batch, replicas=1, replica=0, seed=seed
    )
    for step in range(scale.pretrain_steps):
        batch = corpus.pretrain.batch(sampler.ids(step))
        loss = F.cross_entropy(model(batch.inputs_BT).flatten(0, 1), batch.targets.flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {name: weight.detach() for name, weight in model.state_dict().items()}


def fine_tune(
    corpus: Corpus,
    config: RunConfig,
    weights: Weights | None,
    *,
    method: str,
    codecs: Mapping[Direction, Codec] | None = None,
    eval_batch: int = _EVAL_BATCH,
) -> Row:
    """Train a copy of `weights` as `config` says and evaluate it.

    None are those that `config` names; then nothing is evaluated before. `codecs` take the place of
    the boundaries of their direction.

    Raises:
        RuntimeError: a step was not finite.
    """
    start = time.perf_counter()
    sampler = EpochSampler(
        len(corpus.tune),
        batch_size=config.train.batch_size,
        replicas=1,
        replica=0,
        seed=config.run.seed,
    )
    steps = config.train.epochs * sampler.steps_per_epoch
    with in_process(config, total_steps=steps) as built:
        if weights is not None:
            _load(built, weights)
        send_with(built, codecs or {})
        torch.manual_seed(config.run.seed)  # random dropout
        losses = {}
        if weights is not None:
            losses["before"] = _evaluate(built, corpus.held_out, eval_batch, compressed=False)[
                "loss"
            ]
        epochs: list[Epoch] = []
        for epoch in range(config.train.epochs):
            totals = [
                _train_step(built, corpus.tune, sampler, epoch * sampler.steps_per_epoch + step)
                for step in range(sampler.steps_per_epoch)
            ]
            epochs.append(_epoch(totals))
        after = _after(built, corpus.held_out, eval_batch)
        return Row(
            method,
            {**losses, "loss": epochs[-1].loss, **sizes(epochs), **after},
            {"lr": config.train.lr},
            config.run.seed,
            {
                "epochs": [asdict(epoch) for epoch in epochs],
                "seconds": time.perf_counter() - start,
            },
        )


def _after(built: Built, held_out: SampleSet, batch: int) -> dict[str, float]:
    exact, compressed = (_evaluate(built, held_out, batch, compressed=c) for c in (False, True))
    found = {"held out": exact.pop("loss"), "held out, compressed": compressed.pop("loss")}
    return found | exact | {f"{name}, compressed": value for name, value in compressed.items()}


def sizes(epochs: Sequence[Epoch]) -> dict[str, float | None]:
    """Bits per value in all epochs but the first, how much less than fp32 that is, and MB."""
    later = epochs[1:] or epochs
    each = sum(epoch.values for epoch in later) / 2
    changes = [epoch.change for epoch in epochs if epoch.change is not None]
    return {
        "bits forward": 8 * sum(epoch.forward_bytes for epoch in later) / each,
        "bits backward": 8 * sum(epoch.backward_bytes for epoch in later) / each,
        "x fp32": _ratio(later),
        "x fp32, whole run": _ratio(epochs),
        "MB of epoch 1": epochs[0].nbytes / 1e6,
        "MB of the last": epochs[-1].nbytes / 1e6,
        "change, epoch 2": changes[0] if changes else None,
        "change, last": changes[-1] if changes else None,
    }


def _ratio(epochs: Sequence[Epoch]) -> float:
    return 4 * sum(epoch.values for epoch in epochs) / sum(epoch.nbytes for epoch in epochs)


def _load(built: Built, weights: Weights) -> None:
    for stage in built.stages:
        module: Any = stage.submod
        module.load_state_dict({name: weights[name] for name in module.state_dict()})


def _train_step(built: Built, sequences: SampleSet, sampler: EpochSampler, step: int) -> StepTotals:
    totals = built.engine.train_step(sequences.batch(sampler.ids(step)), step)
    if totals.skipped:
        raise RuntimeError(
            f"step {step}: loss or gradients are not finite; lower the learning rate"
        )
    built.lr_schedule.step()
    return totals


def _epoch(totals: Sequence[StepTotals]) -> Epoch:
    wire = [part for step in totals for part in step.wire]
    seen = [part.change for part in wire if part.direction == "forward"]
    changes = [change for change in seen if change is not None]
    return Epoch(
        loss=sum(step.loss * step.tokens for step in totals) / sum(step.tokens for step in totals),
        forward_bytes=sum(part.nbytes for part in wire if part.direction == "forward"),
        backward_bytes=sum(part.nbytes for part in wire if part.direction == "backward"),
        values=sum(part.values for part in wire),
        change=sum(changes) / len(changes) if changes else None,
    )


def _evaluate(
    built: Built, samples: SampleSet, batch: int, *, compressed: bool
) -> dict[str, float]:
    engine = built.engine
    measures = Measures(named_metrics(engine.objective.metrics))
    heads = [
        engine.eval_step(samples.batch(ids_B), 0, compressed=compressed, measures=measures)
        for ids_B in torch.split(torch.arange(len(samples)), batch)
    ]
    loss, count = (sum(part) for part in zip(*heads, strict=True))
    return {
        "loss": mean_loss(loss, count),
        **measures.values(engine.transport.gather(measures.packed())),
    }
