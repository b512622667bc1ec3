"""Workloads of the link benchmark: slept compute at published times, or a small real decoder.

Axes: B samples of a microbatch, T tokens, D channels, M microbatches, S samples of a step (M x B).
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.launch.cuts.message_cost import mixing
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.load import load
from thinpipe.launch.data.sample_set import SampleSet
from thinpipe.pipeline.models.transformer import TransformerConfig, build_layers
from thinpipe.pipeline.wire.told import BACKWARD, FORWARD

Form = Literal["paper-shaped", "training"]
PAPER_BALANCE_BPS = 485e6
_WARM, _TIMED = 2, 7
_VISITS = 3
_CHANGES = (0.1, 0.3)
"""Of values from their mean over visits, forward and backward: gradients of two visits then have a
cosine of 0.92, between the 0.86 and 0.99 that were measured in fine-tuning."""


class Workload(Protocol):
    """One training step, divided into stages. Sample ids may be any numbers."""

    @property
    def form(self) -> Form:
        """Its name in rows."""

    @property
    def boundary(self) -> torch.Size:
        """Shape [B, T, D] of what crosses a cut for one microbatch."""

    @property
    def microbatches(self) -> int:
        """M."""

    def module(self, stage: int, stages: int, wire: torch.dtype) -> nn.Module:
        """A stage with inputs and outputs of that type at its cuts."""

    def batch(self, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the first stage and targets of the last."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss of one microbatch."""

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer of a stage's parameters, if it has any."""


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

    form: Literal["paper-shaped"] = "paper-shaped"

    @property
    def boundary(self) -> torch.Size:
        return torch.Size((self.samples, self.tokens, self.width))

    def module(self, stage: int, stages: int, wire: torch.dtype) -> nn.Module:
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
        return torch.zeros(len(ids_S), 1), torch.zeros(len(ids_S), 1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output.float() - target).sum()

    def optimizer(self, module: nn.Module) -> None:
        return


class _CastEnds(nn.Module):
    """A stage computing in fp32 between cuts of another type."""

    def __init__(self, stage: nn.Module, wire: torch.dtype, *, first: bool, last: bool) -> None:
        super().__init__()
        self.stage, self._wire, self._first, self._last = stage, wire, first, last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stage(x if self._first else x.float())
        return y if self._last else y.to(self._wire)


@dataclass(frozen=True)
class Training:
    """Real training of a byte-level decoder on the source of Python's standard library.

    Stages on small processors are slower than the paper's, so links are slowed down by the same
    factor (`dilation`): where the transfer of an fp32 boundary took as long as half of a
    microbatch's compute at 485 Mbit/s there, it does here at 485 Mbit/s divided by it.
    """

    width: int = 256
    blocks: int = 2
    heads: int = 4
    tokens: int = 128
    samples: int = 4
    microbatches: int = 8
    lr: float = 1e-4

    form: Literal["training"] = "training"

    @property
    def boundary(self) -> torch.Size:
        return torch.Size((self.samples, self.tokens, self.width))

    def module(self, stage: int, stages: int, wire: torch.dtype) -> nn.Module:
        config = TransformerConfig(
            layers=self.blocks * stages, width=self.width, heads=self.heads, context=self.tokens
        )
        first = self.blocks * stage
        layers = build_layers(config, first, first + self.blocks, seed=0, device="cpu")
        if wire == torch.float32:
            return layers
        return _CastEnds(layers, wire, first=stage == 0, last=stage == stages - 1)

    def batch(self, ids_S: Tensor) -> tuple[Tensor, Tensor]:
        batch = self._text.batch(ids_S % len(self._text))
        return batch.inputs_BT, batch.targets

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=self.lr)

    def dilation(self) -> float:
        """How much slower links must be here; measured on one stage, on an idle machine."""
        module = self.module(1, 3, torch.float32)
        x_BTD = torch.randn(self.boundary, requires_grad=True)
        gradient_BTD = torch.randn(self.boundary)
        compute_s = _median_s(lambda: module(x_BTD).backward(gradient_BTD))
        balance_bps = 8 * 4 * self.boundary.numel() / (compute_s / 2)
        return PAPER_BALANCE_BPS / balance_bps

    @cached_property
    def _text(self) -> SampleSet:
        config = DataConfig(
            sequence_length=self.tokens, train_sequences=256, eval_sequences=1, max_bytes=1 << 20
        )
        return load(config)[0]


def _median_s(work: Callable[[], None]) -> float:
    times_s = []
    for _ in range(_WARM + _TIMED):
        begin_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begin_s)
    return sorted(times_s[_WARM:])[_TIMED // 2]
