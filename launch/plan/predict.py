"""Predicts a step of a run from the costs of its stages and messages, and its network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.plan.message_cost import message_meter
from thinpipe.launch.plan.network import Network
from thinpipe.launch.plan.profile import (
    BlockCost,
    checkpoint_nbytes,
    microbatch_count,
    rank_nbytes,
    shard_traffic,
    under_way_nbytes,
)
from thinpipe.launch.plan.simulate import Message, SimulatedStep, StepModel, simulate
from thinpipe.launch.words import WireKey
from thinpipe.pipeline.schedule import single_stage_order

Blocks = Sequence[Sequence[BlockCost]]
"""[stage][block]: every block on the device of that stage."""


@dataclass(frozen=True)
class StageCost:
    """Blocks `first` to `stop - 1` on one rank; seconds per microbatch, the optimizer's per step.

    `memory` is bytes for weights, gradients, Adam and the activations in flight. Memories of AQ-SGD
    come on top.
    """

    first: int
    stop: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    memory: int


@dataclass(frozen=True)
class Prediction:
    """The predicted step of a run. `unlimited_s` is the step with unlimited links; `bubble` is the
    share of a step in which ranks compute neither forward nor backward, averaged over ranks.
    """

    stages: tuple[StageCost, ...]
    messages: Mapping[WireKey, Message]
    simulated: SimulatedStep
    step_s: float
    unlimited_s: float
    bubble: float


def predict(
    config: RunConfig, blocks: Blocks, messages: Mapping[WireKey, Message], network: Network
) -> Prediction:
    """Simulate a step of `config`. `network` connects its ranks, in bit/s on the wire.

    Raises:
        ValueError: the schedule has several stages per rank, or the network is of another size.
    """
    stages = stage_costs(config, blocks)
    cuts = config.pipeline.cuts
    model = StepModel(
        schedule=config.pipeline.schedule,
        microbatches=microbatch_count(config),
        forward_s=[stage.forward_s for stage in stages],
        backward_s=[stage.backward_s for stage in stages],
        activations=[messages[cut, "forward"] for cut in cuts],
        gradients=[messages[cut, "backward"] for cut in cuts],
        network=network.payload(),
        depth=config.pipeline.depth,
    )
    parts = config.train.accumulate
    simulated, passes_s = _passes(config, model, parts)
    optimizer_s = max(stage.optimizer_s for stage in stages)
    # a step ends with an exchange of losses between all ranks, then the optimizer
    step_s = passes_s + network.highest_latency_s + optimizer_s
    unlimited_s = parts * simulate(replace(model, network=None)).step_s + optimizer_s
    per_microbatch_s = sum(stage.forward_s + stage.backward_s for stage in stages)
    busy_s = parts * model.microbatches * per_microbatch_s
    bubble = 1 - busy_s / (step_s * len(stages))
    return Prediction(tuple(stages), messages, simulated, step_s, unlimited_s, bubble)


def _passes(config: RunConfig, model: StepModel, parts: int) -> tuple[SimulatedStep, float]:
    """The first pass of a step, and how long all take, with what shards send each other.

    As everything simulated, it is the best there can be: weights arrive while the first microbatch
    is computed, and gradients leave during the last backward. Without the time of their codecs.
    """
    plain = simulate(model)
    if config.pipeline.shards == 1:
        return plain, parts * plain.step_s
    weights_s, gradients_s = _between_shards(config, model)
    forward_s, backward_s = model.forward_s, model.backward_s
    if config.shards.gather == "microbatch":
        each = replace(
            model,
            forward_s=list(map(max, forward_s, weights_s)),
            backward_s=[
                max(b, w + g) for b, w, g in zip(backward_s, weights_s, gradients_s, strict=True)
            ],
        )
        found = simulate(each)
        return found, parts * found.step_s
    ready_s = [max(0.0, w - f) for w, f in zip(weights_s, forward_s, strict=True)]
    first = simulate(replace(model, ready_s=ready_s))
    last = first if parts == 1 else plain
    ends_s = {event.stage: event.end_s for event in last.events if event.kind == "B"}
    late_s = [
        ends_s.get(stage, 0.0) + max(0.0, g - b)
        for stage, (g, b) in enumerate(zip(gradients_s, backward_s, strict=True))
    ]
    together_s = first.step_s * (parts > 1) + max(0, parts - 2) * plain.step_s
    return first, together_s + max(last.step_s, *late_s)


def _between_shards(config: RunConfig, model: StepModel) -> tuple[list[float], list[float]]:
    """Seconds to gather a stage's weights once, and to scatter its gradients, by stage.

    Shards of a stage are taken to have links to each other that are as fast as its fastest one.
    """
    network = model.network
    assert network is not None
    alone = network.hosts == 1  # its links are those between shards

    def seconds(stage: int, nbytes: int) -> float:
        return network.link_s(0, 0, nbytes) if alone else network.uplink_s(stage, nbytes)

    traffic = enumerate(shard_traffic(config))
    found = [(seconds(stage, w), seconds(stage, g)) for stage, (w, g) in traffic]
    return [weights_s for weights_s, _ in found], [gradients_s for _, gradients_s in found]


def stage_costs(config: RunConfig, blocks: Blocks) -> list[StageCost]:
    """Costs of every stage of `config.pipeline.cuts`."""
    bounds = (0, *config.pipeline.cuts, len(blocks[0]))
    costs = []
    for stage, (first, stop) in enumerate(pairwise(bounds)):
        own = blocks[stage][first:stop]
        heaviest = checkpoint_nbytes(max(block.parameters for block in blocks[stage]), trained=0)
        memory = sum(block_memory(config, stage, block) for block in own)
        memory += under_way_nbytes(config, heaviest)
        costs.append(
            StageCost(
                first,
                stop,
                sum(block.forward_s for block in own),
                sum(block.backward_s for block in own),
                sum(block.optimizer_s for block in own),
                memory,
            )
        )
    return costs


def block_memory(config: RunConfig, stage: int, block: BlockCost) -> int:
    """Bytes of a block in a stage: parameters, and activations of the microbatches in flight."""
    weights = rank_nbytes(config, block.parameters, block.trained)
    return weights + in_flight(config, stage) * block.activations


def in_flight(config: RunConfig, stage: int) -> int:
    """The most microbatches whose activations a stage holds at once."""
    pipeline = config.pipeline
    if pipeline.pipeline_ranks < pipeline.stages:
        return microbatch_count(config)  # several stages per rank, in torch's order: at most all
    order = single_stage_order(
        pipeline.schedule,
        stage,
        stages=pipeline.stages,
        microbatches=microbatch_count(config),
        depth=pipeline.depth,
    )
    held = most = 0
    for action in order:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


def measure_messages(config: RunConfig) -> dict[WireKey, Message]:
    """Messages of every cut and direction."""
    measure = message_meter(config)
    return {key: measure(spec, key[1]) for key, spec in config.specs.items()}
