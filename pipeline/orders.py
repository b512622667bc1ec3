"""Schedules by name: who computes what, in which order, and which runs fit them.

The order generators are torch's (GPipe: Huang et al. 2019; 1F1B: Narayanan et al. 2019, Interleaved
1F1B: Narayanan et al. 2021; LoopedBFS: Lamy-Poirier 2022; zero bubble: Qi et al. 2023), and one is
ours: Deep1F1B is 1F1B with `depth` more microbatches in flight per hop, so that a slow link always
has a message to carry. GPipe, 1F1B and Deep1F1B run one stage per rank, the others two or more.

`pipeline/schedule.py` runs them; it takes a second to import, which settings and models that are
not cut do without.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch

from thinpipe.pipeline.wire.told import ScheduleName

DEPTH = 2
"""Microbatches per hop that Deep1F1B keeps in flight beyond 1F1B's, where nothing else is said. One
covers the way of a message; the second covers messages that share a link and so come late."""

ONE_STAGE_PER_RANK = ("GPipe", "1F1B", "Deep1F1B")
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")


class PassOrder(NamedTuple):
    """Microbatches of a stage in the order of their forwards, and of their backwards."""

    forwards: Sequence[int]
    backwards: Sequence[int]


class Action(NamedTuple):
    """Compute of one stage on one microbatch.

    Kinds are F, B, and where a backward is in two parts I (inputs) and W (weights).
    """

    kind: str
    stage: int
    microbatch: int


def check_schedule(name: ScheduleName, *, stages: int, ranks: int) -> None:
    """Reject what the schedule cannot run.

    Raises:
        ValueError: naming the setting, its value and what to use instead.
    """
    where = f'pipeline.schedule = "{name}"'
    if name in ONE_STAGE_PER_RANK and stages != ranks:
        several = "" if stages % ranks else ", or a schedule such as Interleaved1F1B"
        raise ValueError(
            f"{where} runs one stage per rank, but {stages} stages are to share {ranks} ranks; "
            f"use pipeline.ranks = {stages}{several}"
        )
    fitting = [n for n in range(1, stages // 2 + 1) if stages % n == 0]
    exact = name == "ZBVZeroBubble"
    if exact:
        fitting = [n for n in fitting if stages == 2 * n]
    if name not in ONE_STAGE_PER_RANK and ranks not in fitting:
        use = f"pipeline.ranks = {' or '.join(map(str, fitting))}" if fitting else "GPipe or 1F1B"
        raise ValueError(
            f"{where} needs {'exactly two' if exact else 'two or more'} stages on every rank, as "
            f"many on each; {stages} stages on {ranks} ranks do not fit; use {use}"
        )
    major, minor = torch.__version__.split(".")[:2]
    if name in ZERO_BUBBLE and (int(major), int(minor)) < (2, 13):
        raise ValueError(
            f"{where} needs torch >= 2.13 (this is {torch.__version__}): before, its gradients are "
            "wrong for a layer that is used twice. Use GPipe, 1F1B, Deep1F1B or Interleaved1F1B"
        )


def fit_microbatches(name: ScheduleName, *, wanted: int, samples: int, ranks: int) -> int:
    """Microbatches for a batch of `samples`: as wanted, fewer when the batch is short.

    Interleaved schedules run whole rounds of microbatches, so theirs are rounded down to one.
    """
    count = min(wanted, samples)
    if name in ONE_STAGE_PER_RANK or name == "ZBVZeroBubble" or count <= ranks:
        return count
    rounds = count // ranks  # torch's constructor rejects a count that they do not divide
    return count - count % rounds


def stage_to_rank(name: ScheduleName, *, stages: int, ranks: int) -> dict[int, int]:
    """Rank (within its pipeline) of each stage: round robin, or a V for ZBVZeroBubble."""
    turns = name == "ZBVZeroBubble"
    rounds = {stage: divmod(stage, ranks) for stage in range(stages)}
    return {s: ranks - 1 - at if turns and n % 2 else at for s, (n, at) in rounds.items()}


def single_stage_order(
    name: ScheduleName, stage: int, *, stages: int, microbatches: int, depth: int = 1
) -> list[Action]:
    """Compute order of a stage that has its rank to itself: GPipe, 1F1B or Deep1F1B."""
    warm_up = {
        "GPipe": microbatches,
        "1F1B": stages - stage,
        "Deep1F1B": (stages - stage) + depth * (stages - 1 - stage),
    }[name]
    in_flight = min(microbatches, warm_up)
    order = [Action("F", stage, m) for m in range(in_flight)]
    for m in range(microbatches):
        order.append(Action("B", stage, m))
        if in_flight + m < microbatches:
            order.append(Action("F", stage, in_flight + m))
    return order


def rank_orders(
    name: ScheduleName, *, stages: int, ranks: int, microbatches: int, depth: int = DEPTH
) -> list[list[Action]]:
    """Actions of each rank of a pipeline, in order. Nothing needs to be connected."""
    if name in ONE_STAGE_PER_RANK:
        return [
            single_stage_order(name, stage, stages=stages, microbatches=microbatches, depth=depth)
            for stage in range(stages)
        ]
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.schedules import _ComputationType

    unconnected = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == stages - 1,
            submod=torch.nn.Identity(),
        )
        for stage, rank in stage_to_rank(name, stages=stages, ranks=ranks).items()
        if rank == 0
    ]
    schedule = getattr(schedules, f"Schedule{name}")(
        unconnected, microbatches, loss_fn=lambda output, _: output, scale_grads=False
    )
    kinds = {
        _ComputationType.FORWARD: "F",
        _ComputationType.FULL_BACKWARD: "B",
        _ComputationType.BACKWARD_INPUT: "I",
        _ComputationType.BACKWARD_WEIGHT: "W",
    }
    return [
        [
            Action(kinds[action.computation_type], action.stage_index, action.microbatch_index)
            for action in schedule.pipeline_order[rank]
            if action is not None and action.computation_type in kinds
        ]
        for rank in range(ranks)
    ]
