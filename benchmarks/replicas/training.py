"""Fine-tune with several replicas in one process: real methods and messages, no network.

Backward passes run one after the other; where a method exchanges, every replica is on a thread of
its own. Bytes are those of a run over a network.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fidelity.finetuning import Corpus, Scale, Weights
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.registry import load_method, parse_options
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.pipeline.models.transformer import TransformerStage, build_layers
from thinpipe.pipeline.replica_sync import ReplicaSync

_EVAL_BATCH, _CLIP_NORM = 64, 1.0
_PAUSE_S = 3600.0  # a long run may be paused


@dataclass(frozen=True)
class Method:
    """A method of `gradcomp.methods` with options."""

    label: str
    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Epoch:
    """Losses in nats per byte: of training, each replica with its own parameters, and of the global
    model after the epoch, on the text it is trained on and on held-out text.
    """

    local: float
    tuned: float
    held_out: float


@dataclass(frozen=True)
class Outcome:
    """One method with one seed. `step_nbytes` is what a replica sends per step, headers included.

    `ring_nbytes` is what an fp32 ring all-reduce of the same parameters sends.
    """

    method: str
    seed: int
    epochs: tuple[Epoch, ...]
    step_nbytes: float
    ring_nbytes: float
    seconds: float

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than an fp32 ring."""
        return self.ring_nbytes / self.step_nbytes


@dataclass(frozen=True)
class _Replica:
    model: TransformerStage
    sync: ReplicaSync
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    sampler: EpochSampler


class Replicas:
    """Copies of one model that train together."""

    def __init__(
        self, size: int, method: Method, scale: Scale, *, weights: Weights, seed: int
    ) -> None:
        peers = local_peers(size, timeout_s=_PAUSE_S)
        self._replicas = []
        for peer in peers:
            model = build_layers(scale.model, 0, scale.layers, seed=seed, device="cpu")
            options = parse_options(method.name, method.options)
            sync = load_method(method.name).build(options, list(model.parameters()), peer)
            model.load_state_dict(weights)
            sampler = EpochSampler(
                scale.sequences, batch_size=scale.batch, replicas=size, replica=peer.rank, seed=seed
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=scale.lr, weight_decay=0.01)
            steps = scale.epochs * sampler.steps_per_epoch
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_then_linear(steps))
            self._replicas.append(_Replica(model, sync, optimizer, schedule, sampler))
        self.steps_per_epoch = self._replicas[0].sampler.steps_per_epoch
        self._pool = ThreadPoolExecutor(size)

    def step(self, sequences: SampleSet, step: int) -> float:
        """One step of all; the mean loss."""
        losses = [self._backward(replica, sequences, step) for replica in self._replicas]
        self._on_all(lambda replica: replica.sync.before_step())
        for replica in self._replicas:
            torch.nn.utils.clip_grad_norm_(replica.model.parameters(), _CLIP_NORM)
            replica.optimizer.step()
            replica.schedule.step()
            replica.optimizer.zero_grad()
        self._on_all(lambda replica: replica.sync.after_step())
        return sum(losses)

    def global_loss(self, sequences: SampleSet) -> float:
        """Loss of the model that all replicas stand for."""
        replica, total = self._replicas[0], 0.0
        with torch.no_grad(), replica.sync.global_parameters():
            for ids_B in torch.split(torch.arange(len(sequences)), _EVAL_BATCH):
                batch = sequences.batch(ids_B)
                logits = replica.model(batch.inputs_BT).flatten(0, 1)
                loss = F.cross_entropy(logits, batch.targets.flatten())
                total += float(loss) * len(ids_B)
        return total / len(sequences)

    def sent(self) -> int:
        """Bytes sent so far, all replicas."""
        return sum(replica.sync.bytes_sent for replica in self._replicas)

    def close(self) -> None:
        """End what is under way."""
        for replica in self._replicas:
            replica.sync.state_dict()  # waits for an exchange under way
        self._pool.shutdown()

    def _backward(self, replica: _Replica, sequences: SampleSet, step: int) -> float:
        """The replica's part of the mean loss."""
        replica.sync.begin_step(1)
        batch = sequences.batch(replica.sampler.ids(step))
        logits = replica.model(batch.inputs_BT).flatten(0, 1)
        loss: Tensor = F.cross_entropy(logits, batch.targets.flatten()) / len(self._replicas)
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _on_all(self, call: Callable[[_Replica], None]) -> None:
        list(self._pool.map(call, self._replicas))


def train(
    corpus: Corpus, method: Method, scale: Scale, *, replicas: int, weights: Weights, seed: int
) -> Outcome:
    """Fine-tune from `weights` and follow the global model.

    Raises:
        RuntimeError: a loss is not finite.
    """
    start = time.perf_counter()
    group = Replicas(replicas, method, scale, weights=weights, seed=seed)
    epochs: list[Epoch] = []
    for epoch in range(scale.epochs):
        first = epoch * group.steps_per_epoch
        losses = [group.step(corpus.tune, first + i) for i in range(group.steps_per_epoch)]
        local = sum(losses) / len(losses)
        if not math.isfinite(local):
            raise RuntimeError(f"{method.label}, epoch {epoch + 1}: the loss is not finite")
        tuned, held_out = group.global_loss(corpus.tune), group.global_loss(corpus.held_out)
        epochs.append(Epoch(local, tuned, held_out))
    group.close()
    steps = scale.epochs * group.steps_per_epoch
    numel = sum(weight.numel() for weight in weights.values())
    return Outcome(
        method=method.label,
        seed=seed,
        epochs=tuple(epochs),
        step_nbytes=group.sent() / steps / replicas,
        ring_nbytes=8 * numel * (replicas - 1) / replicas,
        seconds=time.perf_counter() - start,
    )


def _warm_then_linear(steps: int) -> Callable[[int], float]:
    warmup = max(1, steps // 20)
    return lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def labels(outcomes: Sequence[Outcome]) -> list[str]:
    """Methods, in the order in which they were run."""
    return list(dict.fromkeys(outcome.method for outcome in outcomes))
