"""How many stages and replicas, where to cut, how many microbatches, and which device runs what.

Every number of stages and replicas that the devices, the model and the batch allow is tried, with
as many microbatches as the run file has, twice and four times as many. Cuts are exact for equal
devices. Lower bounds of the step sort the variants, and end the search when none can win. The bits
of the cuts, the schedule and the method of exchange are those of the run file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.plan.message_cost import message_meter
from thinpipe.launch.plan.partition import Problem, best_cuts
from thinpipe.launch.plan.placement.bounds import step_bound
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.solve import ROUNDS, Placement, solve_step
from thinpipe.launch.plan.placement.step import StepCost, StepModel
from thinpipe.launch.plan.placement.workload import Exchange, Workload, count_exchange
from thinpipe.launch.plan.predict import block_memory
from thinpipe.launch.plan.profile import BlockCost, microbatch_count, microbatch_shape
from thinpipe.launch.plan.simulate import Message, check_simulated
from thinpipe.pipeline.wire.header import DIRECTIONS

_TIMES = (1, 2, 4)
_REFINED = 3
"""Variants that are searched with all rounds, the best first."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A variant of the run with its layout."""

    config: RunConfig
    workload: Workload
    placement: Placement
    cost: StepCost

    @property
    def name(self) -> str:
        """`4 stages x 2 replicas, cuts [2, 4, 6], 8 microbatches`."""
        pipeline, work = self.config.pipeline, self.workload
        return (
            f"{pipeline.stages} stages x {pipeline.replicas} replicas, cuts {list(pipeline.cuts)}, "
            f"{work.microbatches} microbatches"
        )

    def hosts(self, cluster: Cluster) -> list[list[str]]:
        """`pipeline.placement`."""
        grid_RP = cluster.host_of_D[self.placement.grid_RP]
        return [[cluster.hosts[host].name for host in row] for row in grid_RP]


def choose(
    config: RunConfig, blocks: Sequence[BlockCost], cluster: Cluster, *, seed: int = 0
) -> list[Choice]:
    """Variants by their predicted step, the shortest first.

    Raises:
        ValueError: the schedule has several stages per rank, or nothing fits the devices.
    """
    check_simulated(config.pipeline.schedule)
    variants = sorted(_variants(config, blocks, cluster), key=lambda found: found[0])
    found: list[Choice] = []
    refused = "the devices are too few"
    for bound_s, variant, work in variants:
        if len(found) >= _REFINED and bound_s >= sorted(c.cost.step_s for c in found)[_REFINED - 1]:
            break
        try:
            found.append(_solved(variant, work, cluster, seed, rounds=0))
        except ValueError as error:
            refused = str(error)
    if not found:
        raise ValueError(f"no number of stages and replicas fits the network: {refused}")
    found.sort(key=lambda choice: choice.cost.step_s)
    refined = [
        _solved(c.config, c.workload, cluster, seed, rounds=ROUNDS) for c in found[:_REFINED]
    ]
    return sorted([*refined, *found[_REFINED:]], key=lambda choice: choice.cost.step_s)


def _solved(
    config: RunConfig, work: Workload, cluster: Cluster, seed: int, *, rounds: int
) -> Choice:
    placement = solve_step(cluster, work, seed=seed, rounds=rounds)
    return Choice(config, work, placement, StepModel(cluster, work)(placement.grid_RP))


def _variants(
    config: RunConfig, blocks: Sequence[BlockCost], cluster: Cluster
) -> Iterator[tuple[float, RunConfig, Workload]]:
    """Lower bound, config and workload of each."""
    messages = _messages(config)
    base = microbatch_shape(config)[0]
    exchanges: dict[int, Exchange] = {}
    for stages in range(1, min(len(blocks), cluster.devices) + 1):
        for replicas in range(1, cluster.devices // stages + 1):
            if config.train.batch_size % (replicas * config.train.accumulate):
                continue
            seen = set()
            for times in _TIMES:
                wanted = times * config.pipeline.microbatches
                change = {
                    "cuts": tuple(range(1, stages)),
                    "replicas": replicas,
                    "microbatches": wanted,
                    "ranks": None,
                    "auto_cuts": False,
                    "placement": (),
                }
                variant = _with(config, change)
                count = microbatch_count(variant)
                if count in seen:
                    continue
                seen.add(count)
                share = microbatch_shape(variant)[0] / base
                scaled = [_scaled(block, share) for block in blocks]
                cuts = _cuts(variant, scaled, cluster)
                if cuts is None:
                    continue
                variant = _with(variant, {"cuts": cuts})
                if replicas not in exchanges:
                    exchanges[replicas] = count_exchange(variant)
                down, up = (_scaled_message(message, share) for message in messages)
                work = _workload(variant, scaled, exchanges[replicas], (down, up))
                yield step_bound(cluster, work), variant, work


def _with(config: RunConfig, change: dict[str, object]) -> RunConfig:
    pipeline = config.pipeline.model_copy(update=change)
    return config.model_copy(update={"pipeline": pipeline})


def _messages(config: RunConfig) -> list[Message]:
    """Of the run file's first cut, or of its default boundary."""
    cuts = config.pipeline.cuts
    boundary, measure = config.boundary_at(cuts[0] if cuts else 1), message_meter(config)
    return [measure(getattr(boundary, direction), direction) for direction in DIRECTIONS]


def _cuts(
    config: RunConfig, blocks: Sequence[BlockCost], cluster: Cluster
) -> tuple[int, ...] | None:
    """The best cuts for equal devices; None if no device has the memory for its stage."""
    stages = config.pipeline.stages
    if stages == 1:
        return ()
    seconds = [block.forward_s + block.backward_s for block in blocks]
    problem = Problem(
        compute_s=[seconds] * stages,
        cut_s=[[0.0] * len(blocks)] * (stages - 1),
        fixed_s=[0.0] * stages,
        memory=[[block_memory(config, s, block) for block in blocks] for s in range(stages)],
        memory_limit=[float(cluster.memory_D.max())] * stages,
    )
    try:
        return best_cuts(problem)
    except ValueError:
        return None


def _workload(
    config: RunConfig,
    blocks: Sequence[BlockCost],
    exchange: Exchange,
    messages: tuple[Message, Message],
) -> Workload:
    bounds = (0, *config.pipeline.cuts, len(blocks))
    of_stage = [blocks[first:stop] for first, stop in pairwise(bounds)]
    return Workload.of_stages(config, of_stage, exchange, [messages] * (len(of_stage) - 1))


def _scaled(block: BlockCost, share: float) -> BlockCost:
    """The same block with microbatches of another size."""
    return replace(
        block,
        forward_s=share * block.forward_s,
        backward_s=share * block.backward_s,
        activations=round(share * block.activations),
    )


def _scaled_message(message: Message, share: float) -> Message:
    return Message(
        int(np.ceil(share * message.nbytes)), share * message.encode_s, share * message.decode_s
    )
