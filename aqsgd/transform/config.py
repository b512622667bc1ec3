"""How transform coding is configured at a direction of a cut."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator

from thinpipe.pipeline.config import WHOLE_PENALTY, BoundaryKind
from thinpipe.pipeline.wire.told import Direction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from thinpipe.aqsgd.store import Store
    from thinpipe.aqsgd.transform.boundary import TransformBoundary
    from thinpipe.aqsgd.transform.steps import Steps
    from thinpipe.pipeline.comm.boundary import Boundary
    from thinpipe.pipeline.comm.message import Mode

_LARGEST_BY_FIRST = 3.0
"""`largest_step` as a multiple of `first_step`, where it is not set. Without a bound a step of 0.6
of the change made the quickstart diverge from scratch, where changes are as large as values."""


class TransformConfig(BoundaryKind):
    """Changes in a basis learned from them, entropy-coded; both directions alike.

    `step` is the quantization step as a multiple of the rms of changes since a sample's last visit.
    `first_step` is that of samples without history, of the value's rms; other steps are at most
    `largest_step` times that rms, by default three times `first_step`. `dimensions` is the share of
    the directions that are sent, those in which values are largest, from when 4 tokens per channel
    were seen; what is in the others is lost, which fine-tuning tolerates and training from scratch
    does not.
    `memory = false` sends every visit like a first one, for runs of one epoch.
    """

    learns: ClassVar[bool] = True

    kind: Literal["transform"] = "transform"
    step: float = Field(0.6, gt=0, le=100, allow_inf_nan=False)
    first_step: float = Field(0.05, gt=0, le=100, allow_inf_nan=False)
    largest_step: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    dimensions: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    memory: bool = True

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.largest_step is not None and not self.memory:
            raise ValueError(
                f"largest_step = {self.largest_step} bounds steps that follow changes, and there "
                "are none with memory = false; leave it out"
            )
        return self

    @property
    def steps(self) -> "Steps":
        from thinpipe.aqsgd.transform.steps import Steps

        largest = self.largest_step or _LARGEST_BY_FIRST * self.first_step
        return Steps(self.step, self.first_step, largest)

    def build(
        self, *, width: int, key: int, store: Any = None, capacity: int | None = None
    ) -> "dict[Mode, Boundary]":
        from thinpipe.aqsgd.transform.evaluation import FirstVisits
        from thinpipe.pipeline.comm.boundary import raw

        training = build_transform(self, width=width, store=store, capacity=capacity)
        return {"train": training, "eval": raw(), "eval_compressed": FirstVisits(training)}

    def settle(
        self, ends: "Sequence[Boundary]", sent_ND: "Tensor", value_ND: "Tensor", *, known: bool
    ) -> None:
        from thinpipe.aqsgd.transform.proposals import settled

        step = self.step if known else self.first_step
        basis = settled(sent_ND, value_ND, step, self.dimensions)
        for end in cast("Sequence[TransformBoundary]", ends):
            end.learned.adopt(basis)

    def row_nbytes(self, tokens: int, width: int) -> int:
        from thinpipe.aqsgd.transform.rows import row_nbytes

        return row_nbytes(width, tokens * width) if self.memory else 0

    def words(self) -> str:
        share = f", dimensions {self.dimensions:g}" if self.dimensions < 1 else ""
        return f"transform step {self.step if self.memory else self.first_step:g}{share}"

    def fidelity(self, direction: Direction) -> float:
        bits = math.log2(4 / (self.step if self.memory else self.first_step))
        return bits if self.memory or direction == "backward" else bits - WHOLE_PENALTY

    def remedy(self) -> str:
        return "use a smaller step, or first_step where samples are new"

    def notices(self, *, epochs: int) -> list[str]:
        if epochs > 1 or not self.memory:
            return []
        return [
            'note: kind = "transform" caches samples for their next visit, and '
            "train.epochs = 1: none is visited again, so step does nothing, first_step is what "
            "counts; memory = false sends the same and needs no memory"
        ]


class GradientTransformConfig(TransformConfig):
    """The transform for gradients, whose first visits need less precision."""

    first_step: float = Field(0.15, gt=0, le=100, allow_inf_nan=False)


def build_transform(
    config: TransformConfig,
    *,
    width: int,
    store: "Store | None" = None,
    capacity: int | None = None,
) -> "TransformBoundary":
    """One end of a direction. Both are built alike, with a store and capacity of their own."""
    from thinpipe.aqsgd.memory import SampleMemory
    from thinpipe.aqsgd.transform.boundary import TransformBoundary
    from thinpipe.aqsgd.transform.learned import Learned
    from thinpipe.aqsgd.transform.rows import row_nbytes

    learned, nbytes = Learned(width), partial(row_nbytes, width)
    capacity = capacity if config.memory else 0
    memory = SampleMemory(nbytes, store, capacity=capacity, shared=learned, caches=config.memory)
    return TransformBoundary(learned, memory, config.steps, config.dimensions)
