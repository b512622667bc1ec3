"""How AQ-SGD is configured at a direction of a cut."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, Field, model_validator

from thinpipe.pipeline.config import Bits, QuantizerConfig, StatelessConfig, build_codec
from thinpipe.pipeline.wire.cast import CastFormat
from thinpipe.pipeline.wire.codec import ChangeCodec, Codec

if TYPE_CHECKING:
    from thinpipe.aqsgd.delta import DeltaBoundary
    from thinpipe.aqsgd.store import Store
    from thinpipe.pipeline.comm.boundary import Boundary
    from thinpipe.pipeline.comm.message import Mode


class MemoryConfig(BaseModel, frozen=True, extra="forbid"):
    """Where a rank keeps its activation cache, and how much of it.

    `tier = "disk"` keeps rows in a file, in `folder` or by default the run folder. `budget`, as in
    "2GB" (decimal) or "512MiB", is what all caches of the rank may take, wherever they are; every
    end of a cut holds equally many samples of it, and of two ends the smaller number counts.
    Samples that do not fit are sent like new ones at every visit.
    """

    tier: Literal["ram", "disk"] = "ram"
    budget: Annotated[ByteSize, Field(gt=0)] | None = None
    folder: str | None = None


class AqsgdConfig(QuantizerConfig):
    """Quantized changes. `first_visit` and `memory`: a float format, that many bits, or tiles.

    `first_visit = "same"` codes first visits as changes are coded, from nothing. Changes are in
    rotated tiles, whose scales no massive activation coarsens for others; `delta = "uniform"`
    codes them as the paper does. That is the default too at 1 and 8 bits and with `scale_per` or
    `rounding`, which tiles do not have.
    """

    kind: Literal["aqsgd"] = "aqsgd"
    first_visit: CastFormat | Bits | StatelessConfig | Literal["same"] = StatelessConfig(bits=6)
    memory: Literal["fp32", "bf16", 4, 8] = "bf16"
    delta: Literal["uniform", "tiles"] | None = None

    @property
    def tiled(self) -> bool:
        if self.delta is not None:
            return self.delta == "tiles"
        return 2 <= self.bits <= 7 and not self._of_uniform()

    def _of_uniform(self) -> list[str]:
        """Settings given that tiles do not have."""
        fields = type(self).model_fields
        names = ("scale_per", "rounding")
        return [name for name in names if getattr(self, name) != fields[name].default]

    @model_validator(mode="after")
    def _changes_can_be_coded(self) -> "AqsgdConfig":
        unused = self._of_uniform()
        if self.delta == "tiles" and unused:
            raise ValueError(
                f'{", ".join(unused)}: has no meaning with delta = "tiles", which has a '
                'bf16 scale per tile and rounds to nearest; remove it, or use delta = "uniform"'
            )
        self.change_codec(width=1)
        return self

    def change_codec(self, width: int) -> ChangeCodec:
        if self.tiled:
            return StatelessConfig(bits=self.bits).codec(width)
        return self.codec(width)

    def first_visit_codec(self, width: int) -> Codec:
        if self.first_visit == "same":
            return self.change_codec(width)
        return build_codec(self.first_visit, width)

    def build(
        self, *, width: int, key: int, store: Any = None, capacity: int | None = None
    ) -> "dict[Mode, Boundary]":
        """Compressed evaluation sends samples without history as first visits."""
        from thinpipe.pipeline.comm.boundary import Stateless, raw

        delta = build_delta(self, width=width, key=key, store=store, capacity=capacity)
        first_visit = Stateless(self.first_visit_codec(width), key)
        return {"train": delta, "eval": raw(), "eval_compressed": first_visit}

    def row_nbytes(self, tokens: int, width: int) -> int:
        return build_codec(self.memory, width).capacity(tokens * width)

    def notices(self, *, epochs: int) -> list[str]:
        if epochs > 1:
            return []
        return [
            "note: AQ-SGD sends changes between epochs, and train.epochs = 1: every sample is sent "
            'as a first visit; kind = "stateless" is smaller for the same error, and kind = '
            '"transform" with memory = false is smaller still'
        ]


class GradientAqsgdConfig(AqsgdConfig):
    """Quantized changes of a sample's gradient since its last visit.

    What is cached is the gradient of the sample's own losses: what they are divided by in a
    step (tokens of the batch, accumulation, replicas) is divided out.
    """

    first_visit: CastFormat | Bits | StatelessConfig | Literal["same"] = "same"


def build_delta(
    config: AqsgdConfig,
    *,
    width: int,
    key: int,
    store: "Store | None" = None,
    capacity: int | None = None,
) -> "DeltaBoundary":
    """One end of a direction. Both are built alike, with a store and capacity of their own."""
    from thinpipe.aqsgd.coded_memory import CodedMemory
    from thinpipe.aqsgd.delta import DeltaBoundary

    return DeltaBoundary(
        CodedMemory(build_codec(config.memory, width), store, capacity=capacity),
        first_visit=config.first_visit_codec(width),
        delta=config.change_codec(width),
        key=key,
    )
