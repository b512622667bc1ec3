"""How AQ-SGD is configured at the forward direction of a cut."""

from typing import Literal

from aqsgd.delta import DeltaBoundary
from aqsgd.memory import SampleMemory
from pipeline.config import Bits, QuantizerConfig, TileConfig, build_codec
from pipeline.wire.cast import CastFormat


class AqsgdConfig(QuantizerConfig):
    """Quantized changes. `first_visit` and `memory`: a float format or that many bits.

    `first_visit = { kind = "stateless", bits = 4 }` sends first visits in tiles.
    """

    kind: Literal["aqsgd"] = "aqsgd"
    first_visit: CastFormat | Bits | TileConfig = 8
    memory: Literal["fp32", "bf16", 4, 8] = "bf16"


def build_delta(config: AqsgdConfig, *, width: int, key: int) -> DeltaBoundary:
    """One end of a direction; both ends are built alike."""
    return DeltaBoundary(
        SampleMemory(build_codec(config.memory, width)),
        first_visit=build_codec(config.first_visit, width),
        delta=config.quantizer(width),
        key=key,
    )
