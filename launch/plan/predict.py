"""Predicts a step of a run from the costs of its blocks and messages, and its network."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.cuts.profile import Blocks
from thinpipe.launch.host.network import Network
from thinpipe.launch.host.words import WireKey, format_duration
from thinpipe.launch.memory.microbatches import microbatch_shape, samples_at_once
from thinpipe.launch.plan.placement.events import one_pipeline
from thinpipe.launch.plan.placement.step import StepCost, StepModel
from thinpipe.launch.plan.placement.workload import Workload

_LARGE_BUBBLE, _WORTH_IT, _SHOWN = 0.3, 0.95, 3  # times differ by 5 % from plan to plan


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

    What shards and replicas send each other is not in it.
    """
    work = Workload.of(config, blocks, messages)
    cost = _cost(work, network)
    unlimited_s = _cost(work, Network.uniform(work.ranks)).step_s
    busy_s = sum(work.microbatch_s) * work.microbatches * work.accumulate
    bubble = 1 - busy_s / (cost.step_s * work.ranks)
    return Prediction(work, messages, cost.passes_s, cost.step_s, unlimited_s, bubble)


def _cost(work: Workload, network: Network) -> StepCost:
    cluster, row_RP = one_pipeline(work, network)
    return StepModel(cluster, work)(row_RP)


def show_suggestions(
    console: Console, config: RunConfig, blocks: Blocks, prediction: Prediction, network: Network
) -> None:
    """If the bubble is large, print the changes that shorten the step most."""
    if prediction.bubble <= _LARGE_BUBBLE:
        return
    tried = ((c, _with(config, c, blocks, prediction, network)) for c in _changes(config))
    good = [pair for pair in tried if pair[1].step_s < _WORTH_IT * prediction.step_s]
    console.print(f"bubble {prediction.bubble:.0%}; reduce it with")
    shown: dict[str, str] = {}
    for change, step in sorted(good, key=lambda pair: (pair[1].step_s, len(pair[0]))):
        named = ", ".join(f"pipeline.{key} = {value!r}" for key, value in change.items())
        result = f"step {format_duration(step.step_s)}, bubble {step.bubble:.0%}"
        shown.setdefault(result, named)  # of equals, the one that changes least
    for result, named in list(shown.items())[:_SHOWN]:
        console.print(f"  {named}: {result}", markup=False, soft_wrap=True)
    console.print("  fewer stages, if the machines have enough memory")
    console.print("  a larger train.batch_size in more microbatches")


def _changes(config: RunConfig) -> Iterator[dict[str, Any]]:
    pipeline = config.pipeline
    for times in (1, 2, 4, 8):
        microbatches = times * pipeline.microbatches
        if times > 1 and microbatches > samples_at_once(config):
            return
        if pipeline.pipeline_ranks < pipeline.stages:  # its ranks have several
            yield {"microbatches": microbatches}
            continue
        for depth in range(pipeline.depth, pipeline.depth + 4):
            change = {"microbatches": microbatches, "schedule": "Deep1F1B", "depth": depth}
            yield {k: v for k, v in change.items() if v != getattr(pipeline, k)}


def _with(
    config: RunConfig,
    change: dict[str, Any],
    blocks: Blocks,
    prediction: Prediction,
    network: Network,
) -> Prediction:
    """Predict the step after a change, with seconds and bytes in proportion to samples."""
    changed = config.model_copy(update={"pipeline": config.pipeline.model_copy(update=change)})
    share = microbatch_shape(changed)[0] / microbatch_shape(config)[0]
    smaller = [[block.of_microbatches(share) for block in row] for row in blocks]
    messages = {key: one.of_microbatches(share) for key, one in prediction.messages.items()}
    return predict(changed, smaller, messages, network)
