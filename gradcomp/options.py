"""Options that all methods share."""

from pydantic import BaseModel, ConfigDict, Field


class ExchangeOptions(BaseModel):
    """`bucket_mb`: how much of the parameters (10^6 bytes) is exchanged at a time."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    bucket_mb: float = Field(25.0, gt=0)

    @property
    def bucket_nbytes(self) -> int:
        """Size of a bucket in bytes."""
        return int(self.bucket_mb * 1e6)
