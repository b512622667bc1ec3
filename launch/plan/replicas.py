"""The machines of a pipeline as replicas instead: a step with every method of exchange.

Where the whole model fits on each machine, replicas that exchange rarely may be faster than a
pipeline: it sends activations in every microbatch, they a fraction of the model now and then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from rich.console import Console
from rich.table import Table

from thinpipe.gradcomp.options import ReplicaCountError
from thinpipe.gradcomp.registry import method_names
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.profile import Blocks
from thinpipe.launch.host.network import Network, seconds
from thinpipe.launch.host.words import format_bytes, format_duration
from thinpipe.launch.memory.exchange import ExchangeCost, measure_exchange
from thinpipe.launch.memory.host import device_nbytes
from thinpipe.launch.memory.microbatches import microbatch_count
from thinpipe.launch.memory.model import BlockRun, rank_memory
from thinpipe.launch.plan.predict import Prediction


@dataclass(frozen=True)
class ReplicaStep:
    """A step of replicas that hold the whole model; `memory` is that of one, in bytes."""

    cost: ExchangeCost
    sent_nbytes: float
    exchange_s: float
    step_s: float
    memory: int


def replica_steps(
    config: RunConfig, blocks: Blocks, network: Network, memory: Sequence[BlockRun]
) -> list[ReplicaStep]:
    """A step of all methods with the machines of one pipeline as replicas, shortest first.

    `memory` is that of all blocks. Machines divide the samples of the pipeline's step. An exchange
    takes as long as its bytes on the slowest link, and two latencies; where it does not overlap,
    that comes on top.
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
    trained = sum(count * block.trained for block, count in memory)
    alone = {"cuts": (), "ranks": None, "shards": 1, "schedule": "1F1B"}
    pipeline = config.pipeline.model_copy(update={**alone, "replicas": replicas})
    whole = config.model_copy(update={"pipeline": pipeline})
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
        (needed,) = device_nbytes(whole, 0, rank_memory(whole, memory, cost))
        found.append(ReplicaStep(cost, sent, exchange_s, step_s, needed))
    return sorted(found, key=lambda step: step.step_s)


def show_replicas(
    console: Console,
    config: RunConfig,
    blocks: Blocks,
    prediction: Prediction,
    network: Network,
    memory: Sequence[BlockRun],
) -> None:
    """Print what the machines would do as replicas, next to the predicted step of the pipeline."""
    steps = replica_steps(config, blocks, network, memory)
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
    most = max(step.memory for step in steps)
    console.print(
        "note: sent by a replica in a step; * overlaps forward and backward; speed-up over the "
        f"predicted pipeline. They need up to {format_bytes(most)} on every machine. What "
        "methods cost in loss is in docs/data_parallel.md",
        soft_wrap=True,
    )
