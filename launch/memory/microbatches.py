"""Microbatches of a pass: how many, how large, and how many a stage holds at once."""

from collections.abc import Iterable

import torch

from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.orders import fit_microbatches, rank_orders


def samples_at_once(config: RunConfig) -> int:
    """Samples in the largest pass of a pipeline, before it accumulates or steps."""
    own = config.train.batch_size // config.pipeline.dp_size
    return -(-own // config.train.accumulate)


def microbatch_count(config: RunConfig) -> int:
    """Microbatches that those samples are divided into."""
    return fit_microbatches(
        config.pipeline.schedule,
        wanted=config.pipeline.microbatches,
        samples=samples_at_once(config),
        ranks=config.pipeline.pipeline_ranks,
    )


def microbatch_shape(config: RunConfig) -> torch.Size:
    """Shape [B, T, D] of the largest microbatch at a cut."""
    per_microbatch = -(-samples_at_once(config) // microbatch_count(config))
    return torch.Size((per_microbatch, *config.message_shape))


def in_flight(config: RunConfig) -> list[int]:
    """The most microbatches whose activations each stage holds at once."""
    pipeline = config.pipeline
    orders = rank_orders(
        pipeline.schedule,
        stages=pipeline.stages,
        ranks=pipeline.pipeline_ranks,
        microbatches=microbatch_count(config),
        depth=pipeline.depth,
    )
    ranks = config.stage_ranks
    return [most_held(orders[ranks[stage]], stage) for stage in range(pipeline.stages)]


def most_held(order: Iterable[tuple[str, int, int]], stage: int) -> int:
    """The same for a stage of a rank that computes in this order."""
    held = most = 0
    for kind, of, _ in order:
        if of == stage:
            # a backward in two parts keeps the activations until its second, W
            held += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
            most = max(most, held)
    return most
