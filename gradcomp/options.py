"""Options that all methods share, and what a run tells a method's own optimizer."""

from typing import ClassVar, Protocol

from pydantic import BaseModel, Field


class ExchangeOptions(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """`bucket_mb`: how much of the parameters (10^6 bytes) is exchanged at a time."""

    group: ClassVar[int] = 128
    """Values that share a bf16 scale, as in CocktailSGD's scripts: 0.125 bits a value."""

    bucket_mb: float = Field(25.0, gt=0)

    @property
    def bucket_nbytes(self) -> int:
        return int(self.bucket_mb * 1e6)


class TrainOptions(Protocol):
    """A run's settings of the optimizer."""

    @property
    def lr(self) -> float:
        """Learning rate after warm-up."""

    @property
    def betas(self) -> tuple[float, float]:
        """Of Adam."""

    @property
    def weight_decay(self) -> float:
        """Decoupled from the gradient."""


class ReplicaCountError(ValueError):
    """A method's options do not fit as many replicas."""
