"""Cost of an exchange between replicas, counted on real messages of a method."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.registry import build_optimizer, load_method, parse_options
from thinpipe.launch.config.sections import TrainConfig
from thinpipe.pipeline.replica_sync import ReplicaSync

_SHAPES = ((1024, 256), (1024,), (256, 512))
_STEPS = 4
_TRAIN = TrainConfig()


@dataclass(frozen=True)
class ExchangeCost:
    """Of a method with its options, per trained parameter.

    `nbytes` is what a replica sends in a step, on average, `state_nbytes` what it keeps besides
    weights, gradients and Adam's moments, `rounds` how often it waits for its peers' messages
    in an exchange. With `overlaps` that is done in parallel with the next step's compute.
    """

    nbytes: float
    state_nbytes: float
    overlaps: bool
    rounds: int = 1


def measure_exchange(
    method: str, options: dict[str, Any], replicas: int, *, steps: int = _STEPS
) -> ExchangeCost:
    """Count what a method sends between replicas in this process, with random moves.

    Over so many `steps` after a warm-up, rounded up to whole periods of a method that exchanges now
    and then.
    """
    config = parse_options(method, options)
    learning = int(getattr(config, "warmup_steps", 0)) and 1
    if learning:
        config = config.model_copy(update={"warmup_steps": learning})
    built = []
    peers = local_peers(replicas)
    for peer in peers:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in _SHAPES]
        sync = load_method(method).build(config, parameters, peer)
        optimizer = build_optimizer(method, config, parameters, _TRAIN, sync)
        optimizer = optimizer or torch.optim.SGD(parameters, _TRAIN.lr)
        built.append((sync, parameters, optimizer, torch.Generator().manual_seed(peer.rank)))
    period = int(getattr(config, "interval", 1))
    warmup = learning + period + 1
    steps = period * ceil(steps / period)
    sent, before = [], 0
    with ThreadPoolExecutor(replicas) as pool:
        for step in range(warmup + steps):
            if step == warmup:
                sent.append(sum(sync.bytes_sent for sync, *_ in built))
                before = peers[0].exchanges
            list(pool.map(lambda one, step=step: _step(step, *one), built))
        states = list(pool.map(lambda one: _kept_nbytes(one[0].state_dict()), built))
        sent.append(sum(sync.bytes_sent for sync, *_ in built))
    numel = sum(parameter.numel() for parameter in built[0][1])
    nbytes = (sent[1] - sent[0]) / steps / replicas / numel
    rounds = max(1, round((peers[0].exchanges - before) * period / steps))
    return ExchangeCost(nbytes, states[0] / numel, built[0][0].overlaps, rounds)


def _step(
    step: int,
    sync: ReplicaSync,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    sync.begin_step(step, 0)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    sync.before_step()
    sync.commit()
    optimizer.step()
    sync.after_step()


def _kept_nbytes(state: dict[str, Any]) -> int:
    """What a late exchange is to send is there twice until the next step counts."""
    return held_nbytes([state, state.get("pending")])


def held_nbytes(held: Any) -> int:
    """Bytes of all tensors in nested containers."""
    return sum(leaf.nbytes for leaf in tree_leaves(held) if isinstance(leaf, Tensor))
