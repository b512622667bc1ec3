"""What a run tells of its steps: plain numbers, which readers without torch know too."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

FORWARD, BACKWARD = 0, 1
Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
"""Activations go forward, their gradients backward."""

ScheduleName = Literal[
    "GPipe",
    "1F1B",
    "Deep1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
]

EventKind = Literal["F", "B", "W", "encode", "decode", "wait"]

MASSIVE = 100.0
"""How many times the energy of the median token a massive one has at least: ten times its norm."""


@dataclass(frozen=True)
class ErrorStats:
    """What was measured of one direction of a cut in a step, over all replicas.

    `known` and `first_visits` count samples with and without history, `error` is |decoded - a| /
    |a|, `change` |a - m| / |a| and `cosine` that of the angle between activations (or gradients) a
    and cached values m. `massive_tokens` is how many tokens of the sample have more than `MASSIVE`
    times the energy of the median token. `channel_error` and `channel_change` are those of single
    channels without these tokens, the median over channels; `worst_error` is the largest, that of
    `worst_channel`. `largest_channel` has the share `largest_share` of all energy. `gain` is how
    many bits per value a transform saves at the same step, and `dimensions` how many of its
    directions have 95 % of the energy of what is sent, when it was last looked at. None if not
    measured.
    """

    known: int = 0
    first_visits: int = 0
    error: float | None = None
    change: float | None = None
    cosine: float | None = None
    channel_error: float | None = None
    channel_change: float | None = None
    worst_error: float | None = None
    worst_channel: int | None = None
    largest_channel: int | None = None
    largest_share: float | None = None
    massive_tokens: int | None = None
    gain: float | None = None
    dimensions: float | None = None


@dataclass(frozen=True, kw_only=True)
class WireTotal(ErrorStats):
    """One step's traffic of one direction of a cut, over all replicas, and what was measured.

    `nbytes` counts what is really sent, headers included ("bytes" in files); `values` is how many
    numbers they stand for: 2 and 4 bytes for each give the bf16 and fp32 baselines.
    """

    cut: int
    direction: Direction
    nbytes: Annotated[int, Field(alias="bytes")]
    messages: int
    values: int


@dataclass(frozen=True)
class ComputeEvent:
    """One piece of work of a stage, or a wait, in seconds of `time.perf_counter`.

    F is a forward, B a backward (of the input alone where the schedule splits it), W a backward of
    the weights; "encode" and "decode" are what the codec and the link's checks take, "wait" is time
    spent waiting for a message. `rank` is set where the events of all ranks are put together, with
    times since their step began.
    """

    stage: int
    kind: EventKind
    microbatch: int
    start_s: float
    end_s: float
    rank: int = 0

    @property
    def computes(self) -> bool:
        return self.kind in ("F", "B", "W")
