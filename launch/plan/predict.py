"""Predicts a step of a run from the costs of its blocks and messages, and its network."""

from collections.abc import Mapping
from dataclasses import dataclass

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.cuts.profile import Blocks
from thinpipe.launch.host.network import Network
from thinpipe.launch.host.words import WireKey
from thinpipe.launch.plan.placement.events import one_pipeline
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
        return max(self.work.microbatch_s)


def predict(
    config: RunConfig, blocks: Blocks, messages: Mapping[WireKey, Message], network: Network
) -> Prediction:
    """Simulate a step of `config`. `network` connects its ranks, in bit/s on the wire.

    What shards and replicas send each other is not in it.

    Raises:
        ValueError: the network is of another size.
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
