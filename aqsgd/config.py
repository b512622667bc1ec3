"""How AQ-SGD is configured at the forward direction of a cut."""

from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from aqsgd.delta import DeltaBoundary
from aqsgd.memory import SampleMemory
from aqsgd.store import Store
from pipeline.config import Bits, QuantizerConfig, build_codec
from pipeline.wire.cast import CastFormat


class MemoryConfig(BaseModel):
    """Where a rank keeps what it remembers of samples, and how much of it.

    `tier = "disk"` keeps rows in a file, in `folder` or by default the run folder. `budget`, as in
    "2GB" (decimal) or "512MiB", is what all memories of the rank may take, in RAM or on disk; every
    end of a cut holds equally many samples of it, and of two ends the smaller number counts.
    Samples that do not fit are sent like new ones at every visit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tier: Literal["ram", "disk"] = "ram"
    budget: Annotated[ByteSize, Field(gt=0)] | None = None
    folder: str | None = None


class AqsgdConfig(QuantizerConfig):
    """Quantized changes. `first_visit` and `memory`: a float format or that many bits."""

    kind: Literal["aqsgd"] = "aqsgd"
    first_visit: CastFormat | Bits = 8
    memory: Literal["fp32", "bf16", 4, 8] = "bf16"


def build_delta(
    config: AqsgdConfig,
    *,
    width: int,
    key: int,
    store: Store | None = None,
    room: int | None = None,
) -> DeltaBoundary:
    """One end of a direction; both are built alike, but each has a store and room of its own."""
    return DeltaBoundary(
        SampleMemory(build_codec(config.memory, width), store, room=room),
        first_visit=build_codec(config.first_visit, width),
        delta=config.quantizer(width),
        key=key,
    )
