"""The loop that runs a model which is not cut; of cut ones see `test_lossless.py`."""

from typing import Any

import pytest
import torch
from torch import nn

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.comm.channel import Microbatch, Pass
from thinpipe.pipeline.comm.first_error import FirstError
from thinpipe.pipeline.orders import single_stage_order
from thinpipe.pipeline.stage import Channels, MicrobatchLoop, Stage


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
