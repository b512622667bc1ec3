"""The workload of the link benchmark: slept compute at published times.

Axes: B samples of a microbatch, T tokens, D channels, S samples of a step.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.launch.cuts.message_cost import mixing
from thinpipe.pipeline.wire.told import BACKWARD, FORWARD

_VISITS = 3
_CHANGES = (0.1, 0.3)
"""Of values from their mean over visits, forward and backward: gradients of two visits then have a
cosine of 0.92, between the 0.86 and 0.99 that were measured in fine-tuning."""


class _Sleep(torch.autograd.Function):
    """Sleeps as long as a stage computes, and returns values of the right shape."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x_BTD: Tensor, stage: "SleptStage") -> Tensor:
        ctx.stage = stage
        time.sleep(stage.shape.forward_s)
        return stage.next_output()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor | None, None]:
        time.sleep(ctx.stage.shape.backward_s)
        gradient_BTD = ctx.stage.next_gradient() if ctx.needs_input_grad[1] else None
        return torch.zeros(1), gradient_BTD, None


class SleptStage(nn.Module):
    """A stage that sleeps instead of computing. The last one returns one number for its loss.

    What it sends is that of the visits of a step's samples, in turn; beyond the last known visit,
    of the last two.
    """

    def __init__(self, shape: "PaperShape", stage: int, stages: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self._seen = shape, Counter[int]()
        self._known = shape.visits(stage, stages, dtype)
        self.weight = nn.Parameter(torch.zeros(1))
        self._outputs, self._gradients = map(cycle, self._known[0])

    def begin_step(self, ids_S: Tensor) -> None:
        """Of these samples, which are always together."""
        first, last = int(ids_S[0]), len(self._known) - 1
        visit = self._seen[first]
        visit -= 2 * max(0, (visit - last + 1) // 2)
        self._outputs, self._gradients = map(cycle, self._known[max(0, visit)])
        self._seen[first] += 1

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = _Sleep.apply(self.weight, x_BTD, self)  # type: ignore[no-untyped-call]
        return y_BTD

    def next_output(self) -> Tensor:
        """A new tensor over the next microbatch's buffer."""
        return next(self._outputs).detach()

    def next_gradient(self) -> Tensor:
        """Likewise, in the order of outputs."""
        return next(self._gradients).detach()


def _made_up(shape_BTD: torch.Size, direction: int) -> list[Tensor]:
    """Values of the spectrum of activations, or of gradients, and as they change between visits."""
    mixing_DD = mixing(shape_BTD[-1], direction)
    first_BTD, *others = (torch.randn(shape_BTD) @ mixing_DD for _ in range(1 + _VISITS))
    return [first_BTD + _CHANGES[direction] * other_BTD for other_BTD in others]


@dataclass(frozen=True)
class PaperShape:
    """GPT2-XL on V100-class devices: boundaries of 1024 x 1600 values, one sample per microbatch.

    Everything is real except compute, which is slept: two cores suffice for several stages, and
    schedule, overlap, codecs and links are measured. Seconds are per microbatch. What is sent is
    made up, or `recorded` in training (`benchmarks/time_to_loss/record.py`).
    """

    tokens: int = 1024
    width: int = 1600
    microbatches: int = 8
    forward_s: float = 0.072
    backward_s: float = 0.144
    samples: int = 1
    recorded: Path | None = None

    @property
    def boundary(self) -> torch.Size:
        """Shape [B, T, D] of what crosses a cut for one microbatch."""
        return torch.Size((self.samples, self.tokens, self.width))

    def module(self, stage: int, stages: int, wire: torch.dtype) -> SleptStage:
        """A stage with inputs and outputs of that type at its cuts."""
        return SleptStage(self, stage, stages, wire)

    def visits(
        self, stage: int, stages: int, dtype: torch.dtype
    ) -> list[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """By visit, outputs and gradients of a stage's microbatches, to be sent in turn."""
        is_last, ends = stage == stages - 1, [torch.randn(1, 1)]
        if self.recorded is None:
            ways = (_made_up(self.boundary, way) for way in (FORWARD, BACKWARD))
            made = zip(*ways, strict=True)
            found = [(ends if is_last else [output], [gradient]) for output, gradient in made]
        else:
            known = torch.load(self.recorded, mmap=True)
            found = [
                (ends if is_last else outputs[stage], gradients[max(0, stage - 1)])
                for outputs, gradients in known
            ]
        return [
            ([x.to(dtype) for x in forward], [x.to(dtype) for x in backward])
            for forward, backward in found
        ]

    def batch(self, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the first stage and targets of the last."""
        return torch.zeros(len(ids_S), 1), torch.zeros(len(ids_S), 1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.float() - target).sum()
