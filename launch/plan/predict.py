"""Predicts a step of a run from the costs of its blocks and messages, and its network."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from thinpipe.gradcomp.sharded.collectives import sent_nbytes, units_of
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.cuts.profile import Blocks
from thinpipe.launch.host.network import Network
from thinpipe.launch.host.words import WireKey
from thinpipe.launch.plan.placement.events import one_pipeline, simulate
from thinpipe.launch.plan.placement.step import StepCost, StepModel
from thinpipe.launch.plan.placement.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """The predicted step of one pipeline. `unlimited_s` is the step with unlimited links; `bubble`
    is the share of a step in which ranks compute neither forward nor backward, averaged over ranks.
    """

    work: Workload
    messages: Mapping[WireKey, Message]
    passes_s: float
    step_s: float
    unlimited_s: float
    bubble: float

    @property
    def slot_s(self) -> float:
        """Seconds that the slowest rank computes for one microbatch."""
        return max(self.work.microbatch_s)


def predict(
    config: RunConfig, blocks: Blocks, messages: Mapping[WireKey, Message], network: Network
) -> Prediction:
    """Simulate a step of `config`. `network` connects its ranks, in bit/s on the wire.

    Raises:
        ValueError: the network is of another size.
    """
    work = Workload.of(config, blocks, messages)
    cost = _cost(work, network)
    if config.pipeline.shards > 1:
        cost = _with_shards(config, work, network)
    unlimited_s = _cost(work, Network.uniform(work.ranks)).step_s
    busy_s = sum(work.microbatch_s) * work.microbatches * work.accumulate
    bubble = 1 - busy_s / (cost.step_s * work.ranks)
    return Prediction(work, messages, cost.passes_s, cost.step_s, unlimited_s, bubble)


def _cost(work: Workload, network: Network) -> StepCost:
    cluster, row_RP = one_pipeline(work, network)
    return StepModel(cluster, work)(row_RP)


def _with_shards(config: RunConfig, work: Workload, network: Network) -> StepCost:
    """A step with what shards send each other.

    As everything simulated, it is the best there can be: weights arrive while the first microbatch
    is computed, and gradients leave during the last backward. Without the time of their codecs.
    """
    weights_s, gradients_s = _between_shards(config, work, network)
    if config.shards.gather == "microbatch":
        backward = zip(work.backward_s, weights_s, gradients_s, strict=True)
        slower = replace(
            work,
            forward_s=tuple(map(max, work.forward_s, weights_s)),
            backward_s=tuple(max(b, w + g) for b, w, g in backward),
        )
        return _cost(slower, network)
    waited_s = [max(0.0, w - f) for w, f in zip(weights_s, work.forward_s, strict=True)]
    plain = simulate(work, network)
    first = simulate(work, network, ready_s=work.by_rank(waited_s))
    last = first if work.accumulate == 1 else plain
    ends_s = {event.stage: event.end_s for event in last.events if event.kind in ("B", "W")}
    late_s = [
        ends_s.get(stage, 0.0) + max(0.0, g - b)
        for stage, (g, b) in enumerate(zip(gradients_s, work.backward_s, strict=True))
    ]
    added_s = first.step_s - plain.step_s + max(last.step_s, *late_s) - last.step_s
    cost = _cost(work, network)
    return replace(cost, passes_s=cost.passes_s + added_s, step_s=cost.step_s + added_s)


def _between_shards(
    config: RunConfig, work: Workload, network: Network
) -> tuple[list[float], list[float]]:
    """Seconds to gather a stage's weights once, and to scatter its gradients, by stage.

    Shards of a stage are taken to have links to each other that are as fast as its fastest one.
    """
    payload = network.payload()

    def seconds(stage: int, nbytes: int) -> float:
        rank = work.position_of[stage]
        if network.hosts == 1:  # its links are those between shards
            return payload.link_s(0, 0, nbytes)
        return payload.uplink_s(rank, nbytes)

    traffic = enumerate(shard_traffic(config))
    found = [(seconds(stage, w), seconds(stage, g)) for stage, (w, g) in traffic]
    return [weights_s for weights_s, _ in found], [gradients_s for _, gradients_s in found]


def shard_traffic(config: RunConfig) -> list[tuple[int, int]]:
    """Bytes of weights that a shard of each stage sends to gather them once, and of gradients."""
    sent = []
    for first, stop in pairwise((0, *config.pipeline.cuts, config.model.layers)):
        stage: Any = config.model.build(first, stop, seed=0, device="meta")  # not a custom one
        units = units_of(stage, stage.parts())
        sent.append(sent_nbytes(units, config.shards, config.pipeline.shards))
    return sent
