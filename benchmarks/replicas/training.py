"""Train with several replicas in one process: real methods and messages, no network.

Backward passes run one after the other; where a method exchanges, every replica is on a thread of
its own. Bytes are those of a run over a network.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.fidelity.finetuning import Corpus, Scale, Weights
from benchmarks.harness import Row
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.registry import build_optimizer, load_method, parse_options
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.launch.memory.exchange import held_nbytes
from thinpipe.launch.optimizer import Named, muon_and_adamw, named_parameters
from thinpipe.pipeline.models.transformer import TransformerStage, build_layers
from thinpipe.pipeline.replica_sync import ReplicaSync

_T = TypeVar("_T")
_EVAL_BATCH, _CLIP_NORM = 16, 1.0
_PAUSE_S = 3600.0  # a long run may be paused


@dataclass(frozen=True)
class Method:
    """A method of `gradcomp.methods` with options.

    With `muon` hidden matrices are trained by Muon and all else by AdamW; else AdamW trains all.
    """

    label: str
    name: str
    options: dict[str, Any]
    muon: bool = False


@dataclass(frozen=True)
class Adam:
    """What all optimizers are told."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01


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
            optimizer = _optimizer(method, named_parameters([model]), scale.lr, sync)
            self.steps = scale.epochs * sampler.steps_per_epoch
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_then_linear(self.steps))
            self._replicas.append(_Replica(model, sync, optimizer, schedule, sampler))
        self.numel = sum(p.numel() for p in self._replicas[0].model.parameters())
        self._pool = ThreadPoolExecutor(size)

    def step(self, sequences: SampleSet, step: int) -> float:
        """One step of all; the mean loss."""
        self._on_all(lambda replica: replica.sync.begin_step(step, 1))
        losses = [self._backward(replica, sequences, step) for replica in self._replicas]
        self._on_all(lambda replica: replica.sync.before_step())
        for replica in self._replicas:
            replica.sync.commit()
            if replica.sync.leaves == "gradients":
                torch.nn.utils.clip_grad_norm_(replica.model.parameters(), _CLIP_NORM)
            replica.optimizer.step()
            replica.schedule.step()
            replica.optimizer.zero_grad()
        self._on_all(lambda replica: replica.sync.after_step())
        return sum(losses)

    def global_loss(self, text: SampleSet) -> float:
        """Loss of the model that all replicas stand for; they make it together."""

        def loss(replica: _Replica) -> float:
            with torch.no_grad(), replica.sync.global_parameters():
                return _loss(replica.model, text) if replica is self._replicas[0] else 0.0

        return self._on_all(loss)[0]

    def sent(self) -> int:
        """Bytes sent so far, all replicas."""
        return sum(replica.sync.bytes_sent for replica in self._replicas)

    def finish(self) -> None:
        """Apply what is under way: training is over."""
        self._on_all(lambda replica: replica.sync.finish())

    def state_nbytes(self) -> float:
        """What the first replica's optimizer and method hold per parameter."""
        replica = self._replicas[0]
        held = [replica.sync.state_dict(), replica.optimizer.state_dict()["state"]]
        return held_nbytes(held) / sum(p.numel() for p in replica.model.parameters())

    def close(self) -> None:
        self._pool.shutdown()

    def _backward(self, replica: _Replica, sequences: SampleSet, step: int) -> float:
        """The replica's part of the mean loss."""
        batch = sequences.batch(replica.sampler.ids(step))
        with torch.autocast("cpu", torch.bfloat16):
            logits = replica.model(batch.inputs_BT).flatten(0, 1)
        loss: Tensor = F.cross_entropy(logits.float(), batch.targets.flatten())
        shared = replica.sync.loss_scope == "global"
        torch.autograd.backward(loss / len(self._replicas) if shared else loss)
        return float(loss.detach()) / len(self._replicas)

    def _on_all(self, call: Callable[[_Replica], _T]) -> list[_T]:
        return list(self._pool.map(call, self._replicas))


def train(
    corpus: Corpus, method: Method, scale: Scale, *, replicas: int, weights: Weights, seed: int
) -> Row:
    """Train from `weights`.

    Numbers are how many times fewer bytes than in a ring all-reduce of the same parameters a
    replica sends, headers included; the loss of the global model on held-out text [nats per token],
    and in training, in the last quarter of the steps, each replica with its own parameters; and the
    bytes per parameter that a replica holds in addition: the optimizer's state and the method's.

    Raises:
        RuntimeError: a loss is not finite.
    """
    start = time.perf_counter()
    group = Replicas(replicas, method, scale, weights=weights, seed=seed)
    losses = [group.step(corpus.tune, step) for step in range(group.steps)]
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"{method.label}: the loss is not finite")
    group.finish()
    held_out = group.global_loss(corpus.held_out)
    group.close()
    ring = 8 * group.numel * (replicas - 1) / replicas
    return Row(
        method.label,
        {
            "x fp32 ring": ring * group.steps * replicas / group.sent(),
            "held out": held_out,
            "last quarter": mean(losses[-max(1, len(losses) // 4) :]),
            "B/parameter": group.state_nbytes(),
        },
        {"replicas": replicas, "lr": scale.lr},
        seed,
        {"losses": losses, "seconds": time.perf_counter() - start},
    )


def _optimizer(
    method: Method, parameters: Named, lr: float, sync: ReplicaSync
) -> torch.optim.Optimizer:
    """The method's own, or the one it is combined with."""
    adam = Adam(lr)
    options = parse_options(method.name, method.options)
    own = build_optimizer(method.name, options, list(parameters.values()), adam, sync)
    if own is not None:
        return own
    if method.muon:
        return muon_and_adamw(parameters, **asdict(adam))
    return torch.optim.AdamW(parameters.values(), **asdict(adam))


def _loss(model: TransformerStage, sequences: SampleSet) -> float:
    total = 0.0
    for ids_B in torch.split(torch.arange(len(sequences)), _EVAL_BATCH):
        batch = sequences.batch(ids_B)
        logits = model(batch.inputs_BT).flatten(0, 1)
        total += float(F.cross_entropy(logits, batch.targets.flatten())) * len(ids_B)
    return total / len(sequences)


def _warm_then_linear(steps: int) -> Callable[[int], float]:
    warmup = max(1, steps // 20)
    return lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
