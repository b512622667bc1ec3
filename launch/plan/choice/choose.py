"""How many stages and replicas, where to cut, what to send, and which device runs what.

Every number of stages and replicas that the devices, the model and the batch allow is tried, with
as many microbatches as the run file has, twice and four times as many, sending the fewest bytes
(`fidelity.py`). Cuts are exact for equal devices. Lower bounds of the step sort the variants, and
end the search when none can win. The best get the schedule that is fastest in their layout, then
the fidelity that their links can carry, and are placed again with that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from thinpipe.launch.config.boundary import Spec
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.partition import Problem, best_cuts
from thinpipe.launch.cuts.profile import BlockCost
from thinpipe.launch.host.words import WireKey
from thinpipe.launch.memory.host import added_nbytes
from thinpipe.launch.memory.microbatches import microbatch_count, microbatch_shape
from thinpipe.launch.memory.model import BlockRun, ModelMemory, block_memory
from thinpipe.launch.plan.choice.fidelity import CompressionLevels, Settings, raised
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.solve import ROUNDS, Placement, solve_step
from thinpipe.launch.plan.placement.step import StepCost, StepModel, step_bound
from thinpipe.launch.plan.placement.workload import Workload
from thinpipe.pipeline.orders import DEPTH
from thinpipe.pipeline.wire.told import DIRECTIONS, ScheduleName

_TIMES = (1, 2, 4)  # of the run file's microbatches; each is a search of its own
_REFINED = 3  # variants that are searched with all rounds, the best first
_SCHEDULES: tuple[ScheduleName, ...] = ("Deep1F1B", "1F1B", "GPipe")
_WORTH = 0.99
"""The run file's schedule is kept unless another takes less than this share of its step."""


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A variant of the run with its layout; `specs` and `gradcomp` are what it sends."""

    config: RunConfig
    workload: Workload
    placement: Placement
    cost: StepCost
    specs: dict[WireKey, Spec]
    gradcomp: dict[str, Any]

    @property
    def name(self) -> str:
        """`4 stages x 2 replicas, cuts [2, 4, 6], 8 microbatches, Deep1F1B`."""
        pipeline = self.config.pipeline
        return (
            f"{pipeline.stages} stages x {pipeline.replicas} replicas, cuts {list(pipeline.cuts)}, "
            f"{self.workload.microbatches} microbatches, {pipeline.schedule}"
        )

    def hosts(self, cluster: Cluster) -> list[list[str]]:
        grid_RP = cluster.host_of_D[self.placement.grid_RP]
        return [[cluster.hosts[host].name for host in row] for row in grid_RP]


@dataclass(frozen=True, eq=False)
class _Variant:
    """Stages, replicas, cuts, microbatches and schedule of a run with so many samples; blocks are
    those of its microbatches, of which one is `share` of the run file's.
    """

    config: RunConfig
    sequences: int
    blocks: Sequence[BlockCost]
    memory: Sequence[ModelMemory]
    share: float
    levels: CompressionLevels

    @property
    def lean(self) -> Settings:
        """The settings with the fewest bytes."""
        return Settings(dict.fromkeys(product(self.config.pipeline.cuts, DIRECTIONS), 0))

    def workload(self, settings: Settings) -> Workload | None:
        """Its demands on devices; None if it cannot have those settings."""
        exchange = None
        if self.config.pipeline.replicas > 1:
            exchange = self.levels.exchange(self.config, settings.exchange)
            if exchange is None:
                return None
        messages = {
            key: sent.message.of_microbatches(self.share)
            for key, sent in self.levels.at(settings).items()
        }
        work = Workload.of(self.config, [self.blocks] * self.config.pipeline.stages, messages)
        try:
            return work.replicated(self.config, self.sequences, self.memory, exchange)
        except ValueError:  # memory.budget is too small for a sample at each of these cuts
            return None

    def scheduled(self, schedule: ScheduleName) -> "_Variant":
        depth = self.config.pipeline.depth if schedule == "Deep1F1B" else DEPTH  # of no other
        return replace(self, config=_with(self.config, {"schedule": schedule, "depth": depth}))


def choose(
    config: RunConfig,
    blocks: Sequence[BlockCost],
    cluster: Cluster,
    sequences: int = 0,
    *,
    memory: Sequence[ModelMemory] | None = None,
    seconds: float | None = None,
) -> list[PlannedRun]:
    """Variants of a run with so many samples by their predicted step, the shortest first.

    All have one stage per rank. `memory` is that of each block, by default as counted; `seconds`
    bounds the search of the best variants, instead of a number of rounds.

    Raises:
        ValueError: nothing fits the devices.
    """
    if config.pipeline.schedule not in _SCHEDULES:
        config = _with(config, {"schedule": _SCHEDULES[0], "ranks": None})
    if memory is None:
        memory = [block for block, count in block_memory(config) for _ in range(count)]
    whole = _Variant(config, sequences, blocks, memory, 1.0, CompressionLevels(config))
    bounded = sorted(_variants(whole, cluster), key=lambda found: found[0])
    found: list[tuple[float, _Variant, Settings]] = []
    rejected = "the devices are too few"
    for bound_s, variant in bounded:
        if len(found) >= _REFINED and bound_s >= sorted(f[0] for f in found)[_REFINED - 1]:
            break
        try:
            found.append(_fitting(variant, cluster))
        except ValueError as error:
            rejected = str(error)
    if not found:
        raise ValueError(f"no number of stages and replicas fits the network: {rejected}")
    found.sort(key=lambda first: first[0])
    each_s = None if seconds is None else seconds / (2 * _REFINED)
    choices = [_refined(variant, start, cluster, each_s) for _, variant, start in found[:_REFINED]]
    return sorted(choices, key=lambda choice: choice.cost.step_s)


def _fitting(variant: _Variant, cluster: Cluster) -> tuple[float, _Variant, Settings]:
    """Step, variant and settings: as it is, or with what needs less memory, if it has to."""
    lean, frugal = variant.lean, variant.scheduled("1F1B")
    faithful = replace(lean, exchange=len(variant.levels.exchanges) - 1)
    rejected = "the replicas cannot exchange in this way"
    for trial, settings in ((variant, lean), (frugal, lean), (frugal, faithful)):
        work = trial.workload(settings)
        if work is None:
            continue
        try:
            return solve_step(cluster, work, rounds=0).cost, trial, settings
        except ValueError as error:
            rejected = str(error)
    raise ValueError(rejected)


def _refined(
    variant: _Variant, start: Settings, cluster: Cluster, seconds: float | None
) -> PlannedRun:
    """Search, choose the schedule, raise fidelity, and search again."""

    def searched(work: Workload) -> Placement:
        return solve_step(cluster, work, rounds=ROUNDS, seconds=seconds)

    def step_of(trial: _Variant, settings: Settings) -> float:
        work = trial.workload(settings)
        return math.inf if work is None else StepModel(cluster, work)(first.grid_RP).step_s

    work = variant.workload(start)
    assert work is not None, "it was solved before"
    first = searched(work)
    others = [variant.scheduled(name) for name in _SCHEDULES]
    fastest = min(others, key=lambda other: step_of(other, start))
    if step_of(fastest, start) < _WORTH * step_of(variant, start):
        variant = fastest
    settings = raised(lambda trial: step_of(variant, trial), start, variant.levels)
    work = variant.workload(settings)
    assert work is not None, "its step is finite"
    model, again = StepModel(cluster, work), searched(work)
    kept = model(first.grid_RP).step_s
    if kept < again.cost:  # the search before, for fewer bytes, was the luckier one
        again = replace(first, cost=kept)
    specs = {key: sent.spec for key, sent in variant.levels.at(settings).items()}
    gradcomp = variant.levels.exchanges[settings.exchange]
    return PlannedRun(variant.config, work, again, model(again.grid_RP), specs, gradcomp)


def _variants(whole: _Variant, cluster: Cluster) -> Iterator[tuple[float, _Variant]]:
    config = whole.config
    base = microbatch_shape(config)[0]
    for stages in range(1, min(len(whole.blocks), cluster.devices) + 1):
        for replicas in range(1, cluster.devices // stages + 1):
            if config.train.batch_size % (replicas * config.train.accumulate):
                continue
            shapes: dict[int, RunConfig] = {}  # by the microbatches that it has in fact
            for times in _TIMES:
                change = {
                    "cuts": tuple(range(1, stages)),
                    "replicas": replicas,
                    "microbatches": times * config.pipeline.microbatches,
                    "ranks": None,
                    "placement": (),
                }
                shape = _with(config, change)
                shapes.setdefault(microbatch_count(shape), shape)
            for shape in shapes.values():
                share = microbatch_shape(shape)[0] / base
                variant = replace(
                    whole,
                    config=shape,
                    blocks=[block.of_microbatches(share) for block in whole.blocks],
                    memory=[block.of_microbatches(share) for block in whole.memory],
                    share=share,
                )
                cuts = _cuts(variant, cluster)
                if cuts is None:
                    continue
                variant = replace(variant, config=_with(shape, {"cuts": cuts}))
                work = variant.workload(variant.lean)
                yield step_bound(cluster, work) if work else 0.0, variant


def _with(config: RunConfig, change: dict[str, object]) -> RunConfig:
    pipeline = config.pipeline.model_copy(update=change)
    return config.model_copy(update={"pipeline": pipeline})


def _cuts(variant: _Variant, cluster: Cluster) -> tuple[int, ...] | None:
    """The best cuts for equal devices; None if no device has the memory for its stage."""
    stages, blocks = variant.config.pipeline.stages, variant.blocks
    if stages == 1:
        return ()
    seconds = [block.forward_s + block.backward_s for block in blocks]
    runs = [BlockRun(block, 1) for block in variant.memory]
    try:
        # without what replicas keep, which depends on the method
        added, without = added_nbytes(variant.config, variant.sequences, runs, None)
    except ValueError:
        return None
    problem = Problem(
        compute_s=[seconds] * stages,
        cut_s=[[0.0] * len(blocks)] * (stages - 1),
        fixed_s=[0.0] * stages,
        memory=added,
        memory_limit=[float(cluster.memory_D.max())] * stages,
        fixed_memory=without,
    )
    try:
        return best_cuts(problem)
    except ValueError:
        return None
