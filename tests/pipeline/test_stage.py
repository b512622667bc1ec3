"""Our stage against torch's own PipelineStage under the same schedules, bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tests.ranks import Ranks
from tests.training import batch, config, train_steps
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.batch import Batch, Samples
from thinpipe.pipeline.comm.channel import Microbatch, Pass
from thinpipe.pipeline.comm.first_error import FirstError
from thinpipe.pipeline.models.transformer import build_layers
from thinpipe.pipeline.orders import single_stage_order, stage_to_rank
from thinpipe.pipeline.schedule import build_schedule
from thinpipe.pipeline.stage import Channels, MicrobatchLoop, Stage

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


class _Loop(nn.Module):
    """Fails on a sample that is 9, and has nothing to learn from one that is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 9).any():
            raise ValueError("no nines")
        return x * self.weight if x.any() else x


def loop_of(samples: list[float]) -> tuple[MicrobatchLoop, dict[str, Any]]:
    stage = Stage(_Loop(), 0, 1, channels=Channels(), group=None)
    size, count = torch.Size((1, 1, 1)), len(samples)
    known = [Microbatch(size, Samples(torch.tensor([m]))) for m in range(count)]
    stage.begin_pass(Pass(0, 0, "train", known, FirstError()))
    order = single_stage_order("1F1B", 0, stages=1, microbatches=count)
    loop = MicrobatchLoop(stage, order, lambda y, target: (y - target).square().sum())
    given = torch.tensor(samples)
    return loop, {"inputs": given, "target": torch.zeros(count), "return_outputs": False}


def test_a_microbatch_with_a_constant_loss_adds_nothing() -> None:
    losses: list[torch.Tensor] = []
    loop, given = loop_of([1.0, 0.0, 2.0])
    loop.step(**given, losses=losses)
    assert [float(loss) for loss in losses] == [1, 0, 4]
    assert not any(loss.requires_grad for loss in losses)


def test_what_a_model_raises_is_no_mistake_of_settings() -> None:
    """Which alone are ValueErrors: they are told without a traceback."""
    loop, given = loop_of([1.0, 9.0])
    with pytest.raises(RuntimeError, match="the model failed in microbatch 1: no nines"):
        loop.step(**given, losses=[])


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
