"""How transform coding is configured at a direction of a cut."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from thinpipe.aqsgd.memory import SampleMemory
from thinpipe.aqsgd.store import Store
from thinpipe.aqsgd.transform.boundary import BITS, TransformBoundary
from thinpipe.aqsgd.transform.learned import Learned
from thinpipe.aqsgd.transform.rows import row_nbytes
from thinpipe.aqsgd.transform.steps import Steps
from thinpipe.pipeline.wire.coding.entropy import Coding

_LARGEST_BY_FIRST = 3.0
"""`largest_step` as a multiple of `first_step`, where it is not set."""


class TransformConfig(BaseModel):
    """Changes (or values) in a basis learned from them, entropy-coded; both directions alike.

    `step` is the quantization step as a multiple of the rms of what `of` says: the change since a
    sample's last visit, or the value itself. `first_step` is that of samples without history, of
    the value's rms; steps that follow changes are at most `largest_step` times that rms, by default
    three times `first_step`. With `error` steps are chosen such that decoded values are that far
    from what they should be, relative to them; 0.05 is gentle. `dimensions` is the share of the
    directions that are sent, those in which values are largest, from when 4 tokens per channel were
    seen; what is in the others is lost, which fine-tuning bears and training from scratch does not.
    `memory = false` sends every visit like a first one, for runs of one epoch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["transform"] = "transform"
    step: float = Field(0.6, gt=0, le=100, allow_inf_nan=False)
    of: Literal["change", "value"] = "change"
    first_step: float = Field(0.05, gt=0, le=100, allow_inf_nan=False)
    largest_step: float | None = Field(None, gt=0, le=100, allow_inf_nan=False)
    error: float | None = Field(None, gt=0, lt=1)
    dimensions: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    memory: bool = True

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.error is not None and self.dimensions < 1:
            raise ValueError(
                f"error = {self.error} with dimensions = {self.dimensions}: what is left out is an "
                "error of its own; set one of them"
            )
        follows = self.memory and self.of == "change" and self.error is None
        if self.largest_step is not None and not follows:
            raise ValueError(
                f"largest_step = {self.largest_step} bounds steps that follow changes, and there "
                'are none with memory = false, of = "value" or error; leave it out'
            )
        return self

    @property
    def bits(self) -> int:
        """What it counts as where fidelities are compared; it sends fewer."""
        return BITS

    @property
    def coding(self) -> Coding:
        """Its messages are entropy-coded already."""
        return "none"

    @property
    def rate(self) -> None:
        """Steps are its own."""

    @property
    def steps(self) -> Steps:
        """How the sender chooses steps."""
        largest = self.largest_step or _LARGEST_BY_FIRST * self.first_step
        return Steps(self.step, self.first_step, largest, self.of, self.error)


class GradientTransformConfig(TransformConfig):
    """The transform for gradients, whose first visits need less precision."""

    first_step: float = Field(0.15, gt=0, le=100, allow_inf_nan=False)


def build_transform(
    config: TransformConfig,
    *,
    width: int,
    store: Store | None = None,
    capacity: int | None = None,
) -> TransformBoundary:
    """One end of a direction. Both are built alike, with a store and capacity of their own."""
    learned, memory = Learned(width), None
    if config.memory:
        memory = SampleMemory(row_nbytes, store, capacity=capacity, beside=learned)
    return TransformBoundary(learned, memory, config.steps, config.dimensions)
