"""Options that all methods share."""

from pydantic import BaseModel, ConfigDict, Field


class ExchangeOptions(BaseModel):
    """`bucket_mb`: how much of the parameters (10^6 bytes) is exchanged at a time.

    `chunk_kib` (1024 bytes): how much of a message is sent to a replica at once, and so the most
    that a message of the pipeline can queue behind on the link. Each chunk costs a round
    trip: rate x round trip is a good size where links are long.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    bucket_mb: float = Field(25.0, gt=0)
    chunk_kib: int = Field(256, ge=1)

    @property
    def bucket_nbytes(self) -> int:
        """Size of a bucket in bytes."""
        return int(self.bucket_mb * 1e6)
