"""The machines of a pipeline as replicas instead: a step with every method of exchange.

Where the whole model fits on each machine, replicas that exchange rarely may be faster than a
pipeline: it sends activations in every microbatch, they a fraction of the model now and then.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.options import ReplicaCountError
from thinpipe.gradcomp.registry import build_optimizer, load_method, method_names, parse_options
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.sections import TrainConfig
from thinpipe.launch.plan.network import Network, seconds
from thinpipe.launch.plan.predict import Blocks, Prediction
from thinpipe.launch.plan.profile import microbatch_count, training_nbytes
from thinpipe.launch.words import format_bytes, format_duration
from thinpipe.pipeline.replica_sync import ReplicaSync

_SHAPES = ((1024, 256), (1024,), (256, 512))
_STEPS = 4
_TRAIN = TrainConfig()


@dataclass(frozen=True)
class ExchangeCost:
    """Of one method with its defaults or a run's options, per trained parameter.

    `nbytes` is what a replica sends in a step, on average, `state_nbytes` what it keeps beside
    weights, gradients and Adam's moments, `rounds` how often it waits for its peers' messages
    in an exchange.
    """

    method: str
    nbytes: float
    state_nbytes: float
    overlaps: bool
    rounds: int = 1


@dataclass(frozen=True)
class ReplicaStep:
    """A step of replicas that hold the whole model; `memory` is that of one, in bytes."""

    cost: ExchangeCost
    sent_nbytes: float
    exchange_s: float
    step_s: float
    memory: float


def measure_exchange(method: str, options: dict[str, Any], replicas: int) -> ExchangeCost:
    """Count what a method sends between replicas in this process, with random moves."""
    config = parse_options(method, options)
    learning = int(getattr(config, "warmup_steps", 0)) and 1
    if learning:
        config = config.model_copy(update={"warmup_steps": learning})
    built = []
    peers = local_peers(replicas)
    for peer in peers:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in _SHAPES]
        sync = load_method(method).build(config, parameters, peer)
        own = build_optimizer(method, config, parameters, _TRAIN, sync)
        generator = torch.Generator().manual_seed(peer.rank)
        built.append((sync, parameters, own or torch.optim.SGD(parameters, _TRAIN.lr), generator))
    period = int(getattr(config, "interval", 1))
    warmup = learning + period + 1
    steps = period * ceil(_STEPS / period)
    sent, before = [], 0
    with ThreadPoolExecutor(replicas) as pool:
        for step in range(warmup + steps):
            if step == warmup:
                sent.append(sum(sync.bytes_sent for sync, *_ in built))
                before = peers[0].exchanges
            list(pool.map(lambda one, step=step: _step(step, *one), built))
        states = list(pool.map(lambda one: held_nbytes(one[0].state_dict()), built))
        sent.append(sum(sync.bytes_sent for sync, *_ in built))
    numel = sum(parameter.numel() for parameter in built[0][1])
    nbytes = (sent[1] - sent[0]) / steps / replicas / numel
    rounds = max(1, round((peers[0].exchanges - before) * period / steps))
    return ExchangeCost(method, nbytes, states[0] / numel, built[0][0].overlaps, rounds)


def replica_steps(config: RunConfig, blocks: Blocks, network: Network) -> list[ReplicaStep]:
    """A step of all methods with the machines of one pipeline as replicas, shortest first.

    Machines divide the samples of the pipeline's step. An exchange takes as long as its bytes on
    the slowest link, and two latencies; where it does not overlap, that comes on top.
    """
    shards, hosts = config.pipeline.shards, range(network.hosts)
    replicas = network.hosts * shards
    total = microbatch_count(config) * config.train.accumulate * shards
    passes = ceil(total / replicas)
    compute_s = max(
        passes * sum(block.forward_s + block.backward_s for block in row)
        + sum(block.optimizer_s for block in row)
        for row in blocks
    )
    trained = sum(block.trained for block in blocks[0])
    memory = sum(
        training_nbytes(block.parameters, block.trained) + block.activations for block in blocks[0]
    )
    links = network.payload()
    rates = [links.rate_bps[i][j] for i in hosts for j in hosts if i != j]
    slowest = min((rate for rate in rates if rate is not None), default=None)
    found = []
    for method in method_names():
        if method == "none":
            continue
        options = config.method_options.model_dump() if method == config.method else {}
        try:
            cost = measure_exchange(method, options, replicas)
        except ReplicaCountError:
            cost = replace(measure_exchange(method, {}, replicas), method=f"{method} (defaults)")
        sent = cost.nbytes * trained
        exchange_s = seconds(round(sent), slowest) + 2 * network.highest_latency_s
        step_s = max(compute_s, exchange_s) if cost.overlaps else compute_s + exchange_s
        memory_nbytes = memory + cost.state_nbytes * trained
        found.append(ReplicaStep(cost, sent, exchange_s, step_s, memory_nbytes))
    return sorted(found, key=lambda step: step.step_s)


def show_replicas(
    console: Console, config: RunConfig, blocks: Blocks, prediction: Prediction, network: Network
) -> None:
    """Print what the machines would do as replicas, beside the predicted step of the pipeline."""
    steps = replica_steps(config, blocks, network)
    table = Table(
        title=f"the same machines as {network.hosts * config.pipeline.shards} replicas of the "
        "whole model",
        title_justify="left",
    )
    for head in ("method", "sent", "exchange", "step", "speed-up"):
        table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)
    for step in steps:
        table.add_row(
            step.cost.method,
            format_bytes(round(step.sent_nbytes)),
            format_duration(step.exchange_s) + ("*" if step.cost.overlaps else " "),
            format_duration(step.step_s),
            f"{prediction.step_s / step.step_s:.2f}",
        )
    console.print(table)
    memory = max(step.memory for step in steps)
    console.print(
        "note: sent by a replica in a step; * beside forward and backward; speed-up over the "
        f"predicted pipeline. They need up to {format_bytes(round(memory))} on every machine. What "
        "methods cost in loss is in docs/data_parallel.md",
        soft_wrap=True,
    )


def _step(
    step: int,
    sync: ReplicaSync,
    parameters: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    moves = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    sync.begin_step(step, 0)
    for parameter, move in zip(parameters, moves, strict=True):
        parameter.grad = move.clone()
    sync.before_step()
    optimizer.step()
    sync.after_step()


def held_nbytes(held: Any) -> int:
    """Bytes of all tensors in nested containers."""
    if isinstance(held, Tensor):
        return held.nbytes
    if isinstance(held, Mapping):
        held = held.values()
    elif not isinstance(held, list | tuple):
        return 0
    return sum(map(held_nbytes, held))
