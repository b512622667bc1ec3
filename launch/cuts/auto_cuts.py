"""`cuts = "auto"`: every machine measures the blocks, and all ranks use the best cuts.

One rank of a machine measures for all of its ranks: ranks that compete for cores would measure
noise. Machines measure at the same time.
"""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.cuts.message_cost import Message, measure_messages
from thinpipe.launch.cuts.partition import Problem, best_cuts
from thinpipe.launch.cuts.profile import BlockCost, Blocks, measure_blocks
from thinpipe.launch.host.device import choose_device, free_gpu_memory, gpu_count
from thinpipe.launch.host.network import Network
from thinpipe.launch.host.resources import free_memory, has_spare_core, usable_cores
from thinpipe.launch.host.words import format_duration
from thinpipe.launch.memory.host import added_nbytes
from thinpipe.launch.memory.model import block_memory, exchange_cost
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.session import Session

_log = logging.getLogger(__name__)
_NOISE = 1.15
"""Costs within this factor count as equal. Ranks that competed for cores timed equal blocks as
unequal, and cut 8 layers into 1, 5 and 2 instead of 3, 3 and 2."""


def decide_cuts(
    config: RunConfig, session: Session, sequences: int, *, saved: Sequence[int] | None, log: bool
) -> RunConfig:
    """The config with its cuts; a collective with the same result on all ranks.

    With `log` this rank logs them. A run of so many `sequences` that is resumed keeps the `saved`
    ones. Links are not measured here: messages are equally long at every cut of these models, so a
    link is equally slow wherever the cut is.

    Raises:
        ValueError: on every rank, if the machines have too little memory.
    """
    if not config.pipeline.auto_cuts:
        return config
    if saved is not None:
        return config.with_cuts(saved)
    measured_here = _measure(config) if session.local_rank == 0 else None
    own = [measured_here, _memory_per_rank(config), spare_core(_ranks_here())]
    measured, limits, spare = _by_stage(config, gather_json(session.transport, own))
    cuts, problem = None, None
    if session.mesh.rank == 0:  # the only one that measures the codecs
        try:
            blocks = smooth_noise(measured)
            cuts = find_cuts(config, blocks, sequences, memory_limit=limits, spare_cores=spare)
        except ValueError as error:
            problem = str(error)
    cuts, problem = gather_json(session.transport, [cuts, problem])[0]
    if problem is not None:
        raise ValueError(problem)
    decided = config.with_cuts(cuts)
    if log:
        bounds = pairwise((0, *cuts, config.model.layers))
        times_s = [sum(map(_seconds, measured[s][a:b])) for s, (a, b) in enumerate(bounds)]
        times = ", ".join(map(format_duration, times_s))
        _log.warning('pipeline.cuts = "auto": %s; stages take %s per microbatch', cuts, times)
    return decided


def smooth_noise(blocks: Blocks) -> Blocks:
    """Give equal seconds to machines, then blocks, whose times differ by no more than noise."""
    totals_s = [sum(map(_seconds, row)) for row in blocks]
    rows = [blocks[representative] for representative in _representatives(totals_s)]
    return [
        [
            replace(block, forward_s=row[like].forward_s, backward_s=row[like].backward_s)
            for block, like in zip(row, _representatives(list(map(_seconds, row))), strict=True)
        ]
        for row in rows
    ]


def _representatives(seconds: Sequence[float]) -> list[int]:
    """For each time, the index of the least one that it equals within the noise."""
    representatives = [0] * len(seconds)
    order = sorted(range(len(seconds)), key=lambda index: seconds[index])
    least = order[0]
    for index in order:
        if seconds[index] > _NOISE * seconds[least]:
            least = index
        representatives[index] = least
    return representatives


def _seconds(block: BlockCost) -> float:
    return block.forward_s + block.backward_s


def _measure(config: RunConfig) -> list[dict[str, Any]]:
    """The least of several rounds, as interference only adds time.

    Ranks that share a core or a GPU are assumed to take that much longer.
    """
    on_cpu = choose_device(config.pipeline.device).type == "cpu"
    cores = torch.get_num_threads() / usable_cores()
    crowding = max(1.0, _ranks_here() * (cores if on_cpu else 1 / gpu_count()))
    measured = measure_blocks(config, min)
    if measured.warning is not None:
        _log.warning('pipeline.cuts = "auto": %s', measured.warning)
    return [asdict(block.on(1 / crowding)) for block in measured.costs]


def _memory_per_rank(config: RunConfig) -> float:
    """Free bytes for the stages of each rank of this host, on its GPU or in RAM."""
    if choose_device(config.pipeline.device).type == "cpu":
        return free_memory() / _ranks_here()
    free = free_gpu_memory()
    assert free is not None, "a GPU was chosen"
    return free / math.ceil(_ranks_here() / gpu_count())


def spare_core(ranks: int) -> bool:
    """Whether this many ranks on this machine leave cores for their codecs."""
    return has_spare_core(usable_cores(), ranks, torch.get_num_threads())


def find_cuts(
    config: RunConfig,
    blocks: Blocks,
    sequences: int = 0,
    *,
    network: Network | None = None,
    memory_limit: Sequence[float] | None = None,
    spare_cores: Sequence[bool] | None = None,
) -> tuple[int, ...]:
    """The best cuts for `config.pipeline.stages`; its own cuts do not count.

    `memory_limit` has the bytes of each stage's machine, for a run of so many `sequences`.
    `spare_cores`: for each stage, whether its codecs have cores of their own; by default as on
    this machine.
    """
    stages, count = config.pipeline.stages, len(blocks[0])
    if stages == 1:
        return ()
    spare = [spare_core(1)] * stages if spare_cores is None else spare_cores
    messages, first = measure_messages(config), config.pipeline.cuts[0]
    down, up = messages[first, "forward"], messages[first, "backward"]
    # without a spare core, a stage in the middle encodes and decodes twice on top of its compute
    above_s, below_s = down.decode_s + up.encode_s, down.encode_s + up.decode_s
    allowed, link_s = set(config.model.cut_places(stages)), _link_seconds(config, down, up, network)
    added, without = [[0] * count] * stages, [0] * stages
    if memory_limit is not None:
        blocks_here = block_memory(config)
        added, without = added_nbytes(config, sequences, blocks_here, exchange_cost(config))
    problem = Problem(
        compute_s=[list(map(_seconds, row)) for row in blocks],
        cut_s=[[s if k in allowed else math.inf for k in range(count)] for s in link_s],
        fixed_s=[
            (above_s * (s > 0) + below_s * (s < stages - 1)) * (not spare[s]) for s in range(stages)
        ],
        memory=added,
        memory_limit=memory_limit or [math.inf] * stages,
        fixed_memory=without,
    )
    return best_cuts(problem)


def _link_seconds(
    config: RunConfig, down: Message, up: Message, network: Network | None
) -> list[float]:
    """Seconds of a microbatch's messages over the link after each stage: the slower direction."""
    payload = (network or Network.uniform(config.pipeline.pipeline_ranks)).payload()
    ranks = [config.stage_ranks[stage] for stage in range(config.pipeline.stages)]
    return [
        max(payload.link_s(a, b, down.nbytes), payload.link_s(b, a, up.nbytes)) * (a != b)
        for a, b in pairwise(ranks)
    ]


def _by_stage(config: RunConfig, everyone: Sequence[Any]) -> tuple[Blocks, list[float], list[bool]]:
    """Costs and memory of each stage: the slowest and the smallest of its replicas; and whether
    all of them have a spare core.

    `everyone` has what each rank sent; only the first rank of a machine sent costs.
    """
    by_rank: list[tuple[list[BlockCost], float, bool]] = []
    for costs, memory, has_spare in everyone:
        own = by_rank[-1][0] if costs is None else [BlockCost(**fields) for fields in costs]
        by_rank.append((own, memory, has_spare))
    pipeline, ranks = config.pipeline, config.stage_ranks
    blocks, limits, spare = [], [], []
    for stage in range(pipeline.stages):
        of_replicas = by_rank[ranks[stage] :: pipeline.pipeline_ranks][: pipeline.replicas]
        costs, memories, spares = zip(*of_replicas, strict=True)
        blocks.append(max(costs, key=lambda row: sum(map(_seconds, row))))
        limits.append(min(memories) / list(ranks.values()).count(ranks[stage]))
        spare.append(all(spares))
    return blocks, limits, spare


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
