"""Schedules by name: what they reject, how batches are fitted, where stages live."""

import pytest
import torch
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from thinpipe.pipeline.orders import (
    check_schedule,
    fit_microbatches,
    single_stage_order,
    stage_to_rank,
)
from thinpipe.pipeline.wire.told import ScheduleName


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_zero_bubble_is_rejected_before_torch_2_13(
    name: ScheduleName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(ValueError, match=r"needs torch >= 2.13 \(this is 2.12.1\)"):
        check_schedule(name, stages=4, ranks=2)


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "message"),
    [
        ("GPipe", 4, 2, "one stage per rank"),
        ("Interleaved1F1B", 3, 2, "as many on each"),
        ("LoopedBFS", 2, 2, "two or more stages"),
        ("ZBVZeroBubble", 6, 2, "exactly two stages on every rank"),
    ],
)
def test_stages_that_do_not_fit_the_ranks_are_rejected(
    name: ScheduleName, stages: int, ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_schedule(name, stages=stages, ranks=ranks)


def test_short_batches_get_fewer_microbatches() -> None:
    assert fit_microbatches("Deep1F1B", wanted=8, samples=3, ranks=4) == 3
    assert fit_microbatches("Deep1F1B", wanted=8, samples=30, ranks=4) == 8
    # whole rounds: 5 microbatches on 2 ranks would be 2 rounds and a half
    assert fit_microbatches("Interleaved1F1B", wanted=8, samples=5, ranks=2) == 4
    assert fit_microbatches("Interleaved1F1B", wanted=8, samples=1, ranks=2) == 1


@pytest.mark.parametrize(
    ("name", "style"), [("Deep1F1B", "loop"), ("LoopedBFS", "loop"), ("ZBVZeroBubble", "v")]
)
@pytest.mark.parametrize(("stages", "ranks"), [(2, 2), (8, 4), (9, 3)])
def test_stages_are_where_torch_runs_them(
    name: ScheduleName, style: str, stages: int, ranks: int
) -> None:
    placed = stage_to_rank(name, stages=stages, ranks=ranks)
    assert placed == generate_stage_to_rank_mapping(ranks, stages, style)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Deep1F1B"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (4, 8)])
def test_orders_hold_every_action_once_and_never_deadlock(
    name: ScheduleName, stages: int, microbatches: int
) -> None:
    orders = [
        single_stage_order(name, stage, stages=stages, microbatches=microbatches)
        for stage in range(stages)
    ]
    done: set[tuple[str, int, int]] = set()
    positions = [0] * stages
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while positions[stage] < len(order):
                action = order[positions[stage]]
                before = ("F", stage - 1) if action.kind == "F" else ("B", stage + 1)
                if 0 <= before[1] < stages and (*before, action.microbatch) not in done:
                    break
                done.add((action.kind, stage, action.microbatch))
                positions[stage] += 1
                progress = True
    assert positions == [2 * microbatches] * stages


def test_depth_bounds_what_is_in_flight() -> None:
    for depth in (0, 1, 2):
        order = single_stage_order("Deep1F1B", 0, stages=4, microbatches=16, depth=depth)
        live = peak = 0
        for action in order:
            live += 1 if action.kind == "F" else -1
            peak = max(peak, live)
        assert peak == 4 + 3 * depth
