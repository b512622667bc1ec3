"""A run's demands on its devices in a step: seconds, bytes after compression, and memory.

All of it is measured or counted from a run file: blocks and messages (`launch/cuts/`), memory and
what a method exchanges (`launch/memory/`); nothing is typed in by hand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import Message
from thinpipe.launch.cuts.profile import BlockCost
from thinpipe.launch.host.words import WireKey
from thinpipe.launch.memory.exchange import ExchangeCost, measure_exchange
from thinpipe.launch.memory.host import device_nbytes
from thinpipe.launch.memory.microbatches import microbatch_count
from thinpipe.launch.memory.model import BlockRun, ModelMemory, rank_memory
from thinpipe.pipeline.orders import DEPTH, Action, rank_orders, stage_to_rank
from thinpipe.pipeline.wire.told import ScheduleName

_MEASURED_REPLICAS = 8
"""What a method sends is counted among at most twice as many; for more it is extrapolated."""


@dataclass(frozen=True)
class Workload:
    """A step of `replicas` pipelines.

    Seconds are per microbatch on a device of speed 1, one for each stage; `activations` and
    `gradients` hold one message per cut; `exchange_nbytes` what a replica sends each peer in a
    step, `optimizer_s` what the update of a stage takes, `memory` what a rank needs.
    """

    replicas: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activations: tuple[Message, ...]
    gradients: tuple[Message, ...]
    microbatches: int
    exchange_nbytes: tuple[float, ...] = ()
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
        return len(self.forward_s)

    @property
    def ranks(self) -> int:
        """Ranks of a pipeline: fewer than stages under schedules with several stages per rank."""
        return self.ranks_per_pipeline or self.stages

    @cached_property
    def position_of(self) -> tuple[int, ...]:
        found = stage_to_rank(self.schedule, stages=self.stages, ranks=self.ranks)
        return tuple(found[stage] for stage in range(self.stages))

    @cached_property
    def orders(self) -> list[list[Action]]:
        """Actions of each rank of a pipeline: kind, stage, microbatch."""
        return rank_orders(
            self.schedule,
            stages=self.stages,
            ranks=self.ranks,
            microbatches=self.microbatches,
            depth=self.depth,
        )

    def by_rank(self, per_stage: Sequence[float]) -> tuple[float, ...]:
        sums = [0.0] * self.ranks
        for stage, value in enumerate(per_stage):
            sums[self.position_of[stage]] += value
        return tuple(sums)

    @property
    def microbatch_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes for a microbatch."""
        return self.by_rank([a + b for a, b in zip(self.forward_s, self.backward_s, strict=True)])

    @property
    def peer_nbytes(self) -> tuple[float, ...]:
        """Bytes to each peer in one round of the exchange, by rank."""
        shared = self.replicas > 1
        return self.by_rank([n / max(1, self.rounds) * shared for n in self.exchange_nbytes])

    @classmethod
    def of(
        cls,
        config: RunConfig,
        blocks: Sequence[Sequence[BlockCost]],
        messages: Mapping[WireKey, Message],
    ) -> "Workload":
        """One pipeline of a run file; `blocks` has them all, on the device of each stage."""
        pipeline = config.pipeline
        bounds = enumerate(pairwise((0, *pipeline.cuts, len(blocks[0]))))
        of_stage = [blocks[stage][first:stop] for stage, (first, stop) in bounds]
        return cls(
            replicas=1,
            forward_s=tuple(sum(block.forward_s for block in own) for own in of_stage),
            backward_s=tuple(sum(block.backward_s for block in own) for own in of_stage),
            activations=tuple(messages[cut, "forward"] for cut in pipeline.cuts),
            gradients=tuple(messages[cut, "backward"] for cut in pipeline.cuts),
            microbatches=microbatch_count(config),
            schedule=pipeline.schedule,
            depth=pipeline.depth,
            ranks_per_pipeline=pipeline.pipeline_ranks,
            accumulate=config.train.accumulate,
            optimizer_s=tuple(sum(block.optimizer_s for block in own) for own in of_stage),
        )

    def replicated(
        self,
        config: RunConfig,
        sequences: int,
        blocks: Sequence[ModelMemory],
        exchange: ExchangeCost | None,
    ) -> "Workload":
        """All replicas of a run with so many samples, whose blocks take this memory."""
        replicas = config.pipeline.replicas
        bounds = pairwise((0, *config.pipeline.cuts, len(blocks)))
        trained = [sum(block.trained for block in blocks[first:stop]) for first, stop in bounds]
        models = rank_memory(config, [BlockRun(block, 1) for block in blocks], exchange)
        memory = tuple(device_nbytes(config, sequences, models))
        whole = replace(self, replicas=replicas, memory=memory)
        if exchange is None:
            return whole
        peer_nbytes = exchange.nbytes / (replicas - 1)
        return replace(
            whole,
            exchange_nbytes=tuple(peer_nbytes * count for count in trained),
            rounds=exchange.rounds,
            overlaps=exchange.overlaps,
        )


def count_exchange(config: RunConfig) -> ExchangeCost | None:
    """Bytes of the run's method, counted on real messages; None without replicas.

    With more replicas than can be run here it is extrapolated from two sizes: what goes to a peer
    is a part that is the same for any number of replicas, and one that they share.
    """
    replicas, options = config.pipeline.replicas, config.method_options.model_dump()
    if replicas == 1:
        return None
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
    return replace(found[0], nbytes=max(0.0, to_peer[0]) * (replicas - 1))
