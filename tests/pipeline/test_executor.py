"""Our in-order executor is an oracle for torch's schedules: the same orders, the same bits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import Ranks
from tests.training import WIDTH, batch, config, start, train_steps, weights
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.batch import Batch, Samples
from thinpipe.pipeline.comm.channel import Microbatch, Pass
from thinpipe.pipeline.comm.first_error import FirstError
from thinpipe.pipeline.executor import run_in_order
from thinpipe.pipeline.schedule import single_stage_order
from thinpipe.pipeline.wire.told import ScheduleName

BATCHES = [batch(list(range(8))), batch([9, 11, 13, 15, 17, 19]), batch(list(range(8)))]
AQSGD = [{"forward": {"kind": "aqsgd", "bits": 3}, "backward": {"kind": "direct", "bits": 6}}]


def own_steps(
    rank: int, run: RunConfig, batches: list[Batch]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with `run_in_order` instead of a torch schedule."""
    built = start(run)
    stages = {stage.stage_index: stage for stage in built.stages}
    losses = []
    for step, item in enumerate(batches):
        count = run.pipeline.microbatches
        targets = item.targets.tensor_split(count)
        shape = (item.inputs_BT.shape[1], WIDTH)
        microbatches = [
            Microbatch(torch.Size((len(ids), *shape)), Samples(ids))
            for ids in item.ids_B.tensor_split(count)
        ]
        stages[rank].has_backward = True
        stages[rank].begin_pass(Pass(step, step, "train", microbatches, FirstError()))
        order = single_stage_order(
            run.pipeline.schedule, rank, stages=run.pipeline.stages, microbatches=count
        )

        def loss(
            logits: torch.Tensor,
            m: int,
            targets: Any = targets,
            total: int = item.targets.numel(),
        ) -> torch.Tensor:
            sums = F.cross_entropy(logits.flatten(0, 1), targets[m].flatten(), reduction="sum")
            return sums / float(total)

        found = run_in_order(
            order, stages, item.inputs_BT.tensor_split(count), finish=loss, train=True
        )
        losses.append(sum(value.item() for value in found.values()))
        built.optimizer.step()
        built.optimizer.zero_grad()
        for channel in stages[rank].channels.all():
            channel.codec.finish_step(keep=True)
    return losses, weights(built)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Deep1F1B"])
@pytest.mark.parametrize("boundary", [None, AQSGD], ids=["raw", "aqsgd"])
def test_executor_equals_torchs_schedule(ranks: Ranks, schedule: str, boundary: Any) -> None:
    sections: dict[str, Any] = {"boundary": boundary} if boundary else {}
    run = config(
        pipeline={"schedule": schedule, "cuts": [1, 2, 3]}, train={"clip_norm": 0}, **sections
    )
    theirs = ranks(4, train_steps, run, BATCHES)
    ours = ranks(4, own_steps, run, BATCHES)
    assert ours[3][0] == theirs[3][0]
    for (_, found), (_, expected, _) in zip(ours, theirs, strict=True):
        for name, weight in found.items():
            assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Deep1F1B"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
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
