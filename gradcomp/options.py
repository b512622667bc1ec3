"""Options that all methods share, and what a run tells a method's own optimizer."""

from typing import ClassVar, Protocol, Self

from pydantic import BaseModel, Field, model_validator

from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Codec


class ExchangeOptions(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """`bucket_mb`: how much of the parameters (10^6 bytes) is exchanged at a time."""

    group: ClassVar[int] = 128
    """Values that share a bf16 scale, as in CocktailSGD's scripts: 0.125 bits a value."""

    bucket_mb: float = Field(25.0, gt=0)  # as DDP's: larger ones leave later in backward

    @property
    def bucket_nbytes(self) -> int:
        return int(self.bucket_mb * 1e6)

    @property
    def copied_nbytes(self) -> int:
        """How much of a bucket is copied to be exchanged."""
        return self.bucket_nbytes

    @property
    def codec(self) -> Codec:
        """Of what is sent."""
        return Cast("fp32")

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        _ = self.codec  # rejects what it cannot be
        return self


class TrainOptions(Protocol):
    """A run's settings of the optimizer; decay is decoupled from gradients, as of AdamW."""

    @property
    def lr(self) -> float: ...

    @property
    def betas(self) -> tuple[float, float]: ...

    @property
    def weight_decay(self) -> float: ...


class ReplicaCountError(ValueError):
    """A method's options do not fit as many replicas."""
