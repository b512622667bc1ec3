"""Our stage against torch's own PipelineStage under the same schedules, bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage

from tests.ranks import Ranks
from tests.training import batch, config, train_steps
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.models.transformer import build_layers
from thinpipe.pipeline.orders import stage_to_rank
from thinpipe.pipeline.schedule import build_schedule

pytestmark = pytest.mark.dist

BATCHES = [batch(list(range(8))), batch(list(range(20, 28)))]  # torch's stage has fixed shapes


def torch_steps(rank: int, run: RunConfig, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """The same training with stock torch.distributed.pipelining."""
    pipeline = run.pipeline
    placement = stage_to_rank(
        pipeline.schedule, stages=pipeline.stages, ranks=pipeline.pipeline_ranks
    )
    bounds = (0, *pipeline.cuts, run.model.layers)
    own = [stage for stage, owner in placement.items() if owner == rank]
    modules: dict[int, Any] = {
        s: build_layers(run.model, bounds[s], bounds[s + 1], seed=0, device="cpu") for s in own
    }
    stages = [
        PipelineStage(modules[s], s, pipeline.stages, torch.device("cpu"), group=dist.group.WORLD)
        for s in own
    ]
    tokens = batches[0].targets.numel()

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sums = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return sums / float(tokens)

    schedule = build_schedule(
        pipeline.schedule, stages, pipeline.microbatches, loss=loss, depth=pipeline.depth
    )
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=run.train.lr,
        betas=run.train.betas,
        weight_decay=run.train.weight_decay,
    )
    for item in batches:
        inputs = (item.inputs_BT,) if 0 in modules else ()
        last = pipeline.stages - 1 in modules
        schedule.step(*inputs, **({"target": item.targets, "losses": []} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
    return {n: w.detach() for module in modules.values() for n, w in module.state_dict().items()}


SCHEDULES = {
    4: ("GPipe", "1F1B", "Deep1F1B"),
    2: ("Interleaved1F1B", "LoopedBFS"),
    1: ("GPipe", "1F1B", "Deep1F1B"),
}
"""By number of ranks; four stages each, but on one rank, where we have a loop of our own."""


def both(rank: int, runs: list[RunConfig]) -> list[tuple[Any, Any]]:
    """Weights of every run, by our stage and by torch's."""
    return [(train_steps(rank, run, BATCHES)[1], torch_steps(rank, run, BATCHES)) for run in runs]


@pytest.mark.parametrize("count", SCHEDULES)
def test_weights_equal_those_of_torchs_stage(ranks: Ranks, count: int) -> None:
    runs = [
        config(
            model={"layers": 8},
            pipeline={"schedule": schedule, "cuts": [2, 4, 6] if count > 1 else []},
            train={"clip_norm": 0},
        )
        for schedule in SCHEDULES[count]
    ]
    for of_rank in ranks(count, both, runs):
        for run, (found, expected) in zip(runs, of_rank, strict=True):
            assert found.keys() == expected.keys()
            for name, weight in found.items():
                assert torch.equal(weight, expected[name]), (run.pipeline.schedule, name)
