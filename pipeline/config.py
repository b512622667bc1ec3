"""How the pipeline engine is configured, and codecs from their configuration."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, WrapValidator, model_validator

from thinpipe.pipeline.orders import DEPTH, ONE_STAGE_PER_RANK
from thinpipe.pipeline.precision import DeviceName, Precision
from thinpipe.pipeline.wire.cast import Cast, CastFormat
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.told import Direction, ScheduleName
from thinpipe.pipeline.wire.uniform import Uniform

if TYPE_CHECKING:
    from torch import Tensor

    from thinpipe.pipeline.comm.boundary import Boundary
    from thinpipe.pipeline.comm.message import Mode
    from thinpipe.pipeline.wire.hadamard import Hadamard

Bits = Annotated[int, Field(ge=1, le=8)]


class AutoCuts(tuple[int, ...]):
    """Cuts 1, 2, ... of `cuts = "auto"`, until they are decided: for what depends on their number
    alone.
    """


def _keep_auto(cuts: Any, validate: Callable[[Any], tuple[int, ...]]) -> tuple[int, ...]:
    return cuts if isinstance(cuts, AutoCuts) else validate(cuts)


class PipelineConfig(BaseModel, frozen=True, extra="forbid"):
    """Where the model is cut and how the stages take turns.

    `cuts = [2, 4]` makes three stages: layers 0-1, 2-3 and the rest; `cuts = "auto"` with
    `stages = 3` leaves the places to a measurement at the start. `replicas` pipelines train
    side by side. `shards` ranks hold each stage together, and share its samples. Schedules with
    several stages per rank (Interleaved1F1B, LoopedBFS and the zero-bubble ones) share the stages
    among `ranks`, by default half as many as there are stages.
    `depth` is how many more microbatches per hop Deep1F1B keeps in flight than 1F1B.
    `device = "auto"` is a GPU where a host has one; a host's GPUs are assigned round-robin.
    `deterministic` makes a GPU compute the same bits again, which a bit-exact resume needs; an
    operation that cannot do that ends the run.
    `devices_per_rank` spreads the blocks of each stage over that many GPUs with torchgpipe; then
    no two ranks share one.
    `offload` keeps in RAM what a GPU does not need all the time: activations until their backward,
    and the optimizer's state between steps.
    `placement` names the host of each rank (`network.name`), a row per replica; by default hosts
    are numbered by name. Without `--nnodes` it has no meaning. `thinpipe plan --place` writes it.
    `peer_timeout_s` is how long to wait for a silent peer; a lost connection is noticed at once.
    """

    READ_AWAY: ClassVar = ("stages",)
    """Keys of a file that are no fields, as they are used up when it is read."""

    cuts: Annotated[tuple[int, ...], WrapValidator(_keep_auto)] = ()
    schedule: ScheduleName = "Deep1F1B"
    depth: int = Field(DEPTH, ge=0)
    microbatches: int = Field(4, ge=1, le=4096)
    replicas: int = Field(1, ge=1)
    shards: int = Field(1, ge=1)
    ranks: int | None = Field(None, ge=1)
    precision: Precision = "fp32"
    device: DeviceName = "auto"
    deterministic: bool = True
    devices_per_rank: int = Field(1, ge=1)
    offload: bool = False
    placement: tuple[tuple[str, ...], ...] = ()
    peer_timeout_s: float = Field(300.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _read_auto(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        given = {key: value for key, value in fields.items() if key != "stages"}
        stages, cuts = fields.get("stages"), given.get("cuts", ())
        if stages is not None and (type(stages) is not int or stages < 1):
            raise ValueError(f"stages = {stages!r}: give a whole number, 1 or more")
        if isinstance(cuts, str) and cuts != "auto":
            raise ValueError(f'cuts = "{cuts}": write a list, as in [1, 2], or "auto"')
        if cuts == "auto":
            if stages is None:
                raise ValueError('cuts = "auto": how many stages? Add stages, as in stages = 4')
            return {**given, "cuts": AutoCuts(range(1, stages))}
        if stages is not None and isinstance(cuts, list | tuple) and stages != len(cuts) + 1:
            raise ValueError(
                f"stages = {stages}, but cuts = {list(cuts)} makes {len(cuts) + 1}; leave out "
                'stages, or write cuts = "auto"'
            )
        return given

    @model_validator(mode="after")
    def _depth_fits_schedule(self) -> "PipelineConfig":
        if self.depth != DEPTH and self.schedule != "Deep1F1B":
            raise ValueError(
                f'depth = {self.depth}: schedule = "{self.schedule}" does not use it; remove it, '
                'or use schedule = "Deep1F1B"'
            )
        return self

    @property
    def auto_cuts(self) -> bool:
        return isinstance(self.cuts, AutoCuts)

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def dp_size(self) -> int:
        """Pipelines that run samples of their own: replicas, or the shards of each."""
        return self.replicas * self.shards

    @property
    def pipeline_ranks(self) -> int:
        if self.ranks is not None:
            return self.ranks
        return self.stages if self.schedule in ONE_STAGE_PER_RANK else max(1, self.stages // 2)


class GuardConfig(BaseModel, frozen=True, extra="forbid"):
    """Whether a direction of a cut that fails is told: `mode = "off"` checks nothing.

    It fails when its relative error exceeds 0.6, or when the relative size of changes is 1.5 times
    the smallest it has been and more than a quarter. It also fails when one channel has a quarter
    of the energy and half of all channels an error of 0.25 of their own. All are means over about
    20 steps.
    """

    mode: Literal["off", "warn"] = "warn"


WHOLE_PENALTY = 2
"""Bits that whole activations need more than gradients and changes. Forward 5 with backward 4
reaches a lower loss than 4 with 6, in fewer bytes (see "One epoch" in
benchmarks/results/aqsgd_beyond_cpu_202611.md).
"""


class BoundaryKind(BaseModel, frozen=True, extra="forbid"):
    """Common base of boundary kinds; they also have `kind`."""

    learns: ClassVar[bool] = False
    """Whether its codec learns from what it sends, so that later messages are others."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str: ...

    def codec(self, width: int) -> Codec:
        """What codes tokens of `width` channels, where nothing is remembered."""
        raise NotImplementedError

    def build(
        self, *, width: int, key: int, store: Any = None, capacity: int | None = None
    ) -> "dict[Mode, Boundary]":
        """Boundaries of a direction by mode; evaluation never touches the activation cache.

        Both ends are built alike, for tokens of `width` channels; `key` addresses their random
        numbers. What is remembered is kept in `store` (by default in RAM), of at most `capacity`
        samples.
        """
        from thinpipe.pipeline.comm.boundary import Stateless, raw

        alone = Stateless(self.codec(width), key)
        return {"train": alone, "eval": raw(), "eval_compressed": alone}

    @abstractmethod
    def words(self) -> str: ...

    @abstractmethod
    def fidelity(self, direction: Direction) -> float:
        """A score to rank settings by: about the bits per value that its error would take."""

    def settle(
        self, ends: "Sequence[Boundary]", sent_ND: "Tensor", value_ND: "Tensor", *, known: bool
    ) -> None:
        """If its codec learns, let both ends know what a run learns from such tokens.

        `sent_ND` is what is coded of the values: changes, if the samples are `known`.
        """

    def row_nbytes(self, tokens: int, width: int) -> int:
        """Bytes that one end of the direction caches per sample; 0: nothing."""
        return 0

    def notices(self, *, epochs: int) -> list[str]:
        return []

    def remedy(self) -> str:
        """What to use where one channel or token is so large that the others are lost."""
        return 'use kind = "transform", or more bits'

    @property
    def remembers(self) -> bool:
        return self.row_nbytes(1, 1) > 0


class RawConfig(BoundaryKind):
    """No compression: values are sent as they are (fp32) or cast."""

    kind: Literal["raw"] = "raw"
    format: CastFormat = "fp32"

    def codec(self, width: int) -> Cast:
        return Cast(self.format)

    def words(self) -> str:
        return f"raw {self.format}"

    def fidelity(self, direction: Direction) -> float:
        return 32 if self.format == "fp32" else 16


class QuantizerConfig(BoundaryKind):
    """Uniform quantization: `bits` per value, and what shares a scale."""

    bits: Bits = 4
    scale_per: Literal["token"] | Annotated[int, Field(ge=1)] = "token"
    rounding: Literal["nearest", "stochastic"] = "nearest"

    @model_validator(mode="after")
    def _can_be_built(self) -> "QuantizerConfig":
        self.codec(width=1)
        return self

    def codec(self, width: int) -> Uniform:
        group = width if self.scale_per == "token" else self.scale_per
        return Uniform(self.bits, group, stochastic=self.rounding == "stochastic")

    def words(self) -> str:
        return f"{self.kind} {self.bits}-bit"

    def fidelity(self, direction: Direction) -> float:
        return self.bits


class DirectConfig(QuantizerConfig):
    """Direct quantization, no activation cache (the baseline of AQ-SGD)."""

    kind: Literal["direct"] = "direct"
    bits: Bits = 8


class StatelessConfig(BoundaryKind):
    """Tile-wise quantization without a cache; see `pipeline/wire/hadamard.py`.

    `bits` is 2 to 7.
    """

    kind: Literal["stateless"] = "stateless"
    bits: int = 4

    @model_validator(mode="after")
    def _has_tiles_of_fewer_and_more(self) -> "StatelessConfig":
        if not 2 <= self.bits <= 7:
            raise ValueError(
                f"bits = {self.bits}: use 2 to 7, as tiles have one bit more or less; "
                'for 1 or 8 bits use kind = "direct"'
            )
        return self

    def codec(self, width: int) -> "Hadamard":
        from thinpipe.pipeline.wire.hadamard import Hadamard

        return Hadamard(self.bits)

    def words(self) -> str:
        return f"stateless {self.bits}-bit"

    def fidelity(self, direction: Direction) -> float:
        return self.bits - WHOLE_PENALTY if direction == "forward" else self.bits


def build_codec(spec: CastFormat | int | StatelessConfig, width: int) -> Codec:
    """Codec for a float format, for bits with one scale per token of `width`, or for tiles."""
    if isinstance(spec, StatelessConfig):
        return spec.codec(width)
    return Uniform(spec, width) if isinstance(spec, int) else Cast(spec)
