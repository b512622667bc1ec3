"""The machines of a pipeline as replicas instead: a step with every method of exchange.

Where the whole model fits on each machine, replicas that exchange rarely may be faster than a
pipeline: it sends activations in every microbatch, they a fraction of the model now and then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rich.console import Console
from rich.table import Table

from thinpipe.gradcomp.options import ReplicaCountError
from thinpipe.gradcomp.registry import method_names, parse_options
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.profile import Blocks
from thinpipe.launch.host.network import Network, seconds
from thinpipe.launch.host.words import format_bytes, format_duration
from thinpipe.launch.memory.exchange import ExchangeCost, measure_exchange
from thinpipe.launch.memory.host import device_nbytes
from thinpipe.launch.memory.microbatches import microbatch_count
from thinpipe.launch.memory.model import BlockRun, rank_memory
from thinpipe.launch.plan.losses import GOAL, Measured, measured
from thinpipe.launch.plan.predict import Prediction


@dataclass(frozen=True)
class ReplicaStep:
    """A step of replicas that hold the whole model; `memory` is that of one, in bytes.

    `loss` is how far such a run ended above all-reduce, if that was measured.
    """

    method: str
    cost: ExchangeCost
    loss: float | None
    sent_nbytes: float
    exchange_s: float
    step_s: float
    memory: int


def replica_steps(
    config: RunConfig, blocks: Blocks, network: Network, memory: Sequence[BlockRun]
) -> list[ReplicaStep]:
    """A step of all methods with a run's machines, of one pipeline or all, as replicas.

    Those whose loss is known to be all-reduce's come first, the shortest step before others. Each
    has the options with which its loss was measured, the run's own method has the run's.

    `memory` is that of all blocks. Machines divide the samples of a step. An exchange
    takes as long as its bytes on the slowest link, and two latencies; where it does not overlap,
    that comes on top.
    """
    shards, hosts = config.pipeline.shards, range(network.hosts)
    replicas = network.hosts * shards
    pipelines = network.hosts // config.pipeline.pipeline_ranks
    total = pipelines * microbatch_count(config) * config.train.accumulate * shards
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
    for tried in _methods(config):
        label = tried.label
        try:
            cost = measure_exchange(tried.method, dict(tried.options), replicas)
        except ReplicaCountError:
            tried, label = Measured(tried.method, {}), f"{tried.method} (defaults)"
            cost = measure_exchange(tried.method, {}, replicas)
        sent = cost.nbytes * trained
        exchange_s = seconds(round(sent), slowest) + 2 * network.highest_latency_s
        step_s = max(compute_s, exchange_s) if cost.overlaps else compute_s + exchange_s
        (needed,) = device_nbytes(whole, 0, rank_memory(whole, memory, cost))
        loss = tried.loss(config)
        found.append(ReplicaStep(label, cost, loss, sent, exchange_s, step_s, needed))
    return sorted(found, key=lambda step: (step.loss is None or step.loss > GOAL, step.step_s))


def _methods(config: RunConfig) -> list[Measured]:
    """The run's own, all that were measured, and the others with their defaults."""
    known, given = measured(), config.method_options
    own = Measured(config.method, given.model_dump(exclude_unset=True))
    listed = {own.method, *(tried.method for tried in known)}
    same = [
        tried
        for tried in known
        if tried.method == own.method and parse_options(own.method, tried.options) == given
    ]
    found = [
        *(same or [own]),
        *(tried for tried in known if tried not in same),
        *(Measured(name, {}) for name in method_names() if name not in listed),
    ]
    return [tried for tried in found if tried.method != "none"]


def show_replicas(
    console: Console,
    config: RunConfig,
    blocks: Blocks,
    prediction: Prediction | None,
    network: Network,
    memory: Sequence[BlockRun],
) -> None:
    """Print what the machines would do as replicas, next to the predicted step of a pipeline."""
    steps = replica_steps(config, blocks, network, memory)
    table = Table(
        title=f"{'the same machines as ' if prediction else ''}"
        f"{network.hosts * config.pipeline.shards} replicas of the whole model",
        title_justify="left",
    )
    table.add_column("method", overflow="fold")
    heads = ["loss", "sent", "exchange", "step", *(["speed-up"] if prediction else [])]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(
            step.method,
            "-" if step.loss is None else f"{step.loss:+.3f}",
            format_bytes(round(step.sent_nbytes)),
            format_duration(step.exchange_s) + ("*" if step.cost.overlaps else " "),
            format_duration(step.step_s),
            *([f"{prediction.step_s / step.step_s:.2f}"] if prediction else []),
        )
    console.print(table)
    most = max(step.memory for step in steps)
    console.print(
        "note: loss at the end above all-reduce, of 4 replicas of a small model "
        f"{'that were fine-tuned' if config.pretrained else 'from scratch'} "
        "(docs/choosing.md), where it is known; who ends as well comes first; sent by a replica "
        "in a step; * overlaps forward and backward"
        f"{'; speed-up over the predicted pipeline' if prediction else ''}. "
        f"They need up to {format_bytes(most)} each",
        soft_wrap=True,
    )
