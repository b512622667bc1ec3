"""How AQ-SGD is configured at the forward direction of a cut."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from aqsgd.delta import DeltaBoundary
from aqsgd.memory import SampleMemory
from pipeline.config import Bits, build_codec, build_uniform
from pipeline.wire.cast import CastFormat
from pipeline.wire.entropy import Coding
from pipeline.wire.uniform import ScalePer


class AqsgdConfig(BaseModel):
    """`bits` per changed value. `first_visit` and `memory`: a float format or that many bits.

    `coding = "zstd"` shortens payloads; it pays where the link is slower than about 1 Gbit/s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["aqsgd"] = "aqsgd"
    bits: Bits = 4
    scale_per: ScalePer = "token"
    scale_dtype: Literal["bf16", "fp32"] = "bf16"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    first_visit: CastFormat | Bits = 8
    memory: Literal["fp32", "bf16", 4, 8] = "bf16"
    coding: Coding = "none"


def build_delta(config: AqsgdConfig, *, width: int, key: int) -> DeltaBoundary:
    """One end of a direction; both ends are built alike."""
    delta = build_uniform(
        bits=config.bits,
        scale_per=config.scale_per,
        scale_dtype=config.scale_dtype,
        rounding=config.rounding,
        width=width,
    )
    memory = SampleMemory(build_codec(config.memory, width))
    return DeltaBoundary(
        memory, first_visit=build_codec(config.first_visit, width), delta=delta, key=key
    )
