"""What a run asks of its devices in a step: seconds, bytes after compression, and memory.

All of it is measured or counted from a run file: blocks (`launch/plan/profile.py`), messages
(`message_cost.py`) and what a method exchanges (`replicas.py`); nothing is typed in by hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.plan.placement.dtfm import DtfmSizes
from thinpipe.launch.plan.predict import block_memory, measure_messages
from thinpipe.launch.plan.profile import BlockCost, microbatch_count
from thinpipe.launch.plan.replicas import measure_exchange
from thinpipe.launch.plan.simulate import Message
from thinpipe.pipeline.schedule import DEPTH, ScheduleName, rank_orders, stage_to_rank

_MEASURED_REPLICAS = 8
"""What a method sends is counted among at most twice as many; for more it is extrapolated."""


@dataclass(frozen=True)
class Exchange:
    """Per trained parameter: bytes to each peer in a step, and what a replica keeps beside weights,
    gradients and Adam. It takes `rounds` rounds; `overlaps`: beside the next step's compute.
    """

    peer_nbytes: float
    rounds: int
    overlaps: bool
    state_nbytes: float


@dataclass(frozen=True)
class Workload:
    """A step of `replicas` pipelines.

    Seconds are per microbatch on a device of speed 1, one for each stage; `activations` and
    `gradients` hold one message per cut; `exchange_nbytes` what a replica sends each peer in a
    step, `memory` what a stage needs, `optimizer_s` what its update takes.
    """

    replicas: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activations: tuple[Message, ...]
    gradients: tuple[Message, ...]
    exchange_nbytes: tuple[float, ...]
    microbatches: int
    schedule: ScheduleName = "Deep1F1B"
    depth: int = DEPTH
    ranks_per_pipeline: int | None = None
    rounds: int = 2
    overlaps: bool = False
    accumulate: int = 1
    optimizer_s: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward_s)

    @property
    def ranks(self) -> int:
        """Ranks of a pipeline: fewer than stages under schedules with several stages per rank."""
        return self.ranks_per_pipeline or self.stages

    @cached_property
    def position_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        found = stage_to_rank(self.schedule, stages=self.stages, ranks=self.ranks)
        return tuple(found[stage] for stage in range(self.stages))

    @cached_property
    def orders(self) -> list[list[tuple[str, int, int]]]:
        """What each rank of a pipeline computes: kind, stage, microbatch."""
        return rank_orders(
            self.schedule,
            stages=self.stages,
            ranks=self.ranks,
            microbatches=self.microbatches,
            depth=self.depth,
        )

    def by_rank(self, per_stage: Sequence[float]) -> tuple[float, ...]:
        """Sums over the stages of each rank."""
        sums = [0.0] * self.ranks
        for stage, value in enumerate(per_stage):
            sums[self.position_of[stage]] += value
        return tuple(sums)

    @property
    def peer_nbytes(self) -> tuple[float, ...]:
        """Bytes to each peer in one round of the exchange, by rank."""
        per_round = [nbytes / max(1, self.rounds) for nbytes in self.exchange_nbytes]
        return self.by_rank(per_round if self.replicas > 1 else [0.0] * self.stages)

    @property
    def sizes(self) -> DtfmSizes:
        """The same for DT-FM's cost: the gradient that its sharded exchange would need to have as
        many bytes, and the activations of a step, both those of the largest.
        """
        nbytes = max(self.exchange_nbytes, default=0.0) * self.replicas / 2
        cuts = zip(self.activations, self.gradients, strict=True)
        per_microbatch = max(((a.nbytes + g.nbytes) / 2 for a, g in cuts), default=0.0)
        passes = self.microbatches * self.accumulate
        return DtfmSizes(self.ranks, self.replicas, nbytes / 1e9, per_microbatch * passes / 1e9)

    @classmethod
    def of(
        cls, config: RunConfig, blocks: Sequence[BlockCost], exchange: Exchange | None = None
    ) -> "Workload":
        """The workload of a run file, whose `blocks` were measured."""
        pipeline = config.pipeline
        messages = measure_messages(config)
        bounds = [0, *pipeline.cuts, len(blocks)]
        return cls.of_stages(
            config,
            [blocks[a:b] for a, b in pairwise(bounds)],
            exchange or count_exchange(config),
            [(messages[cut, "forward"], messages[cut, "backward"]) for cut in pipeline.cuts],
        )

    @classmethod
    def of_stages(
        cls,
        config: RunConfig,
        of_stage: Sequence[Sequence[BlockCost]],
        exchange: Exchange,
        messages: Sequence[tuple[Message, Message]],
    ) -> "Workload":
        """The same from the blocks of each stage, and the messages of each cut, down and up."""
        pipeline = config.pipeline
        trained = [sum(block.trained for block in own) for own in of_stage]
        return cls(
            replicas=pipeline.replicas,
            forward_s=tuple(sum(block.forward_s for block in own) for own in of_stage),
            backward_s=tuple(sum(block.backward_s for block in own) for own in of_stage),
            activations=tuple(down for down, _ in messages),
            gradients=tuple(up for _, up in messages),
            exchange_nbytes=tuple(exchange.peer_nbytes * count for count in trained),
            microbatches=microbatch_count(config),
            schedule=pipeline.schedule,
            depth=pipeline.depth,
            ranks_per_pipeline=pipeline.pipeline_ranks,
            rounds=exchange.rounds,
            overlaps=exchange.overlaps,
            accumulate=config.train.accumulate,
            optimizer_s=tuple(sum(block.optimizer_s for block in own) for own in of_stage),
            memory=tuple(
                sum(block_memory(config, stage, block) for block in own)
                + exchange.state_nbytes * trained[stage] * (pipeline.replicas > 1)
                for stage, own in enumerate(of_stage)
            ),
        )


def count_exchange(config: RunConfig) -> Exchange:
    """What the run's method sends, counted on real messages.

    With more replicas than can be run here it is extrapolated from two sizes: what goes to a peer
    is a part that is the same for any number of replicas, and one that they share.
    """
    replicas, options = config.pipeline.replicas, config.method_options.model_dump()
    if replicas == 1:
        return Exchange(0.0, 0, False, 0.0)
    sizes = [replicas]
    if replicas > 2 * _MEASURED_REPLICAS:
        sizes = [_MEASURED_REPLICAS, 2 * _MEASURED_REPLICAS]
    try:
        found = [measure_exchange(config.method, options, size) for size in sizes]
    except ValueError as error:
        raise ValueError(
            f"gradcomp.method = {config.method!r} with {replicas} replicas: {error}"
        ) from None
    to_peer = [cost.nbytes / (size - 1) for cost, size in zip(found, sizes, strict=True)]
    if len(sizes) == 2:
        shared = (to_peer[0] - to_peer[1]) / (1 / sizes[0] - 1 / sizes[1])
        to_peer = [to_peer[1] - shared / sizes[1] + shared / replicas]
    first = found[0]
    return Exchange(max(0.0, to_peer[0]), first.rounds, first.overlaps, first.state_nbytes)
