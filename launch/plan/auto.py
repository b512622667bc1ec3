"""`cuts = "auto"`: every rank measures the blocks on its machine, all agree on the best cuts."""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from launch import checkpoint
from launch.checkpoint import CheckpointError
from launch.config import RunConfig
from launch.machine import free_memory
from launch.messages import gather_json
from launch.metrics import format_duration
from launch.plan.cost import Blocks, block_memory, measure_messages
from launch.plan.measure import BlockCost, measure_blocks
from launch.plan.network import Network
from launch.plan.partition import Problem, best_cuts, bottleneck_s
from launch.session import Session
from pipeline.schedule import stage_to_rank

_log = logging.getLogger(__name__)
_MEMORY_SHARE = 0.9
"""Of the memory that is free now, what stages may take."""


def decide_cuts(config: RunConfig, session: Session, *, resume: bool) -> RunConfig:
    """The config with its cuts; all ranks call it alike and get the same.

    A resumed run keeps the cuts of its checkpoint. Links are not measured here: messages are as
    long at every cut of these models, so a link is as slow wherever the cut is.

    Raises:
        ValueError: on every rank, if the memory of the machines does not suffice.
    """
    if not config.pipeline.auto_cuts:
        return config
    saved = _saved_cuts(config) if resume else None
    found = [cuts for cuts in gather_json(session.mesh, saved) if cuts is not None]
    if found:
        return config.with_cuts(found[0])
    own = [asdict(block) for block in measure_blocks(config)]
    everyone = gather_json(session.mesh, [own, free_memory() / _ranks_here()])
    blocks, limits = _by_stage(config, everyone)
    cuts = find_cuts(config, blocks, memory_limit=limits)
    if session.local_rank == 0:
        slowest_s = bottleneck_s(_problem(config, blocks, None, limits), cuts)
        _log.warning(
            'pipeline.cuts = "auto": %s, the slowest stage takes %s per microbatch',
            list(cuts),
            format_duration(slowest_s),
        )
    # the codecs' seconds are measured by every rank for itself: only the first one's cuts count
    return config.with_cuts(gather_json(session.mesh, cuts)[0])


def find_cuts(
    config: RunConfig,
    blocks: Blocks,
    *,
    network: Network | None = None,
    memory_limit: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The best cuts for `config.pipeline.stages`, whatever its cuts are.

    Raises:
        ValueError: no way to cut fits the memory.
    """
    if config.pipeline.stages == 1:
        return ()
    return best_cuts(_problem(config, blocks, network, memory_limit))


def _problem(
    config: RunConfig,
    blocks: Blocks,
    network: Network | None,
    memory_limit: Sequence[float] | None,
) -> Problem:
    """A link is busy with the slower of its two directions; a stage in the middle encodes and
    decodes twice, the ends once.
    """
    stages, count = config.pipeline.stages, len(blocks[0])
    messages, first = measure_messages(config), config.pipeline.cuts[0]
    down, up = messages[first, "forward"], messages[first, "backward"]
    payload = (network or Network.uniform(stages)).payload()
    cut_s = [
        max(payload.link_s(s, s + 1, down.nbytes), payload.link_s(s + 1, s, up.nbytes))
        for s in range(stages - 1)
    ]
    above_s, below_s = down.decode_s + up.encode_s, down.encode_s + up.decode_s
    return Problem(
        compute_s=[[block.forward_s + block.backward_s for block in row] for row in blocks],
        cut_s=[[seconds] * count for seconds in cut_s],
        fixed_s=[above_s * (s > 0) + below_s * (s < stages - 1) for s in range(stages)],
        memory=[[block_memory(config, s, block) for block in row] for s, row in enumerate(blocks)],
        memory_limit=memory_limit or [math.inf] * stages,
    )


def _by_stage(config: RunConfig, everyone: Sequence[Any]) -> tuple[Blocks, list[float]]:
    """Costs and memory of each stage: those of the slowest and the smallest of its replicas."""
    pipeline = config.pipeline
    ranks = stage_to_rank(pipeline.schedule, stages=pipeline.stages, ranks=pipeline.pipeline_ranks)
    blocks, limits = [], []
    for stage in range(pipeline.stages):
        told = [
            everyone[replica * pipeline.pipeline_ranks + ranks[stage]]
            for replica in range(pipeline.replicas)
        ]
        costs = [[BlockCost(**fields) for fields in blocks] for blocks, _ in told]
        blocks.append(max(costs, key=lambda row: sum(b.forward_s + b.backward_s for b in row)))
        on_rank = list(ranks.values()).count(ranks[stage])
        limits.append(_MEMORY_SHARE * min(memory for _, memory in told) / on_rank)
    return blocks, limits


def _saved_cuts(config: RunConfig) -> list[int] | None:
    root = config.run.path / "checkpoints"
    try:
        newest = checkpoint.latest(root)
        if newest is None:
            return None
        meta = checkpoint.read_manifest(root / f"step-{newest}").meta
    except CheckpointError:
        return None  # restoring will say what is wrong with it
    cuts: list[int] = meta["config"]["pipeline"]["cuts"]
    return cuts


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
