"""How the pipeline engine is configured, and codecs from their configuration."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.engine import Precision
from pipeline.schedule import ScheduleName
from pipeline.wire.cast import Cast, CastFormat
from pipeline.wire.codec import Codec
from pipeline.wire.entropy import Coding
from pipeline.wire.uniform import ScalePer, Uniform

Bits = Annotated[int, Field(ge=1, le=8)]
DeviceName = Literal["auto", "cpu", "cuda"]


class PipelineConfig(BaseModel):
    """Where the model is cut and how the stages take turns.

    `cuts = [2, 4]` makes three stages: layers 0-1, 2-3 and the rest. `replicas` pipelines train
    side by side. Schedules with several stages per rank (Interleaved1F1B, LoopedBFS and the
    zero-bubble ones) share the stages among `ranks`, by default half as many as there are stages.
    `depth` is how many more microbatches per hop Deep1F1B keeps in flight than 1F1B.
    `device = "auto"` is a GPU where a host has one; ranks of a host share its GPUs in turn.
    `peer_timeout_s` is how long a silent peer is waited for; one that is gone is noticed at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cuts: tuple[int, ...] = ()
    schedule: ScheduleName = "Deep1F1B"
    depth: int = Field(1, ge=0)
    microbatches: int = Field(4, ge=1, le=4096)
    replicas: int = Field(1, ge=1)
    ranks: int | None = Field(None, ge=1)
    precision: Precision = "fp32"
    device: DeviceName = "auto"
    peer_timeout_s: float = Field(300.0, gt=0)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    @property
    def pipeline_ranks(self) -> int:
        """Number of ranks of one pipeline."""
        if self.ranks is not None:
            return self.ranks
        one_per_rank = self.schedule in ("GPipe", "1F1B", "Deep1F1B")
        return self.stages if one_per_rank else max(1, self.stages // 2)


class RawConfig(BaseModel):
    """No compression: values are sent as they are (fp32) or cast."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["raw"] = "raw"
    format: CastFormat = "fp32"


class QuantizerConfig(BaseModel):
    """Uniform quantization: `bits` per value, and what shares a scale.

    `coding = "zstd"` shortens payloads; it pays where the link is slower than about 1 Gbit/s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: Bits = 4
    scale_per: ScalePer = "token"
    scale_dtype: Literal["bf16", "fp32"] = "bf16"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    coding: Coding = "none"

    @model_validator(mode="after")
    def _can_be_built(self) -> "QuantizerConfig":
        self.quantizer(width=1)
        return self

    def quantizer(self, width: int) -> Uniform:
        """The codec, for tokens of `width` channels."""
        return Uniform(
            self.bits,
            self.scale_per,
            width=width,
            scale_dtype=self.scale_dtype,
            stochastic=self.rounding == "stochastic",
        )


class DirectConfig(QuantizerConfig):
    """Direct quantization, no memory (the baseline of AQ-SGD)."""

    kind: Literal["direct"] = "direct"
    bits: Bits = 8


def build_codec(spec: CastFormat | int, width: int) -> Codec:
    """Codec for a float format, or for that many bits with one scale per token of `width`."""
    return Uniform(spec, "token", width=width) if isinstance(spec, int) else Cast(spec)
