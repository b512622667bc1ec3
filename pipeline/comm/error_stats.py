"""What compression does to values, measured where they are encoded.

The first row of a step is measured, and of a boundary with a cache the first known one: enough to
follow a run, at the cost of a pass or two over one sample per step.

Axes: B samples, N values of a sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

SUMS = 10


@dataclass(frozen=True)
class ErrorStats:
    """What was measured of one direction of a cut in a step, over all replicas.

    `known` and `first_visits` count samples with and without history, `error` is |decoded - a| /
    |a|, `change` |a - m| / |a| and `cosine` that of the angle between activations (or gradients) a
    and cached values m. `gain` is how many bits per value a transform saves at the same step, and
    `dimensions` how many of its directions have 95 % of the energy of what is sent, when it was
    last looked at. None if not measured.
    """

    known: int = 0
    first_visits: int = 0
    error: float | None = None
    change: float | None = None
    cosine: float | None = None
    gain: float | None = None
    dimensions: float | None = None


@dataclass
class ErrorMeter:
    """Collects a step's sums at a sender: numbers that add up over replicas.

    `spectrum` is what a transform last found: gain and dimensions.
    """

    spectrum: tuple[float, float] | None = None
    _known: int = 0
    _first_visits: int = 0
    _squares: list[float] = field(default_factory=lambda: [0.0] * 5)
    _seen: set[bool] = field(default_factory=set)

    def count(self, *, known: int, first_visits: int) -> None:
        """Samples that were sent."""
        self._known += known
        self._first_visits += first_visits

    def wants(self, *, known: bool) -> bool:
        """Whether no such row was measured in this step."""
        return known not in self._seen

    def measure(self, x_1N: Tensor, decoded_1N: Tensor, memory_1N: Tensor | None = None) -> None:
        """Take in what a row was, what the peer makes of it, and what both had cached."""
        self._seen.add(memory_1N is not None)
        x_1N = x_1N.float()
        size, error = _square(x_1N), _square(decoded_1N.float() - x_1N)
        sums = [size, error, 0.0, 0.0, 0.0]
        if memory_1N is not None:
            sums[2:] = size, _square(memory_1N.float() - x_1N), _square(memory_1N.float())
        self._squares = [a + b for a, b in zip(self._squares, sums, strict=True)]

    def take(self) -> list[float]:
        """The `SUMS` numbers since the last call, counted from zero again."""
        spectrum = (1.0, *self.spectrum) if self.spectrum and self._seen else (0.0, 0.0, 0.0)
        taken = [float(self._known), float(self._first_visits), *self._squares, *spectrum]
        self._known, self._first_visits, self._squares, self._seen = 0, 0, [0.0] * 5, set()
        return taken


def error_stats(sums: Sequence[float]) -> ErrorStats:
    """Ratios from added-up `ErrorMeter.take`s."""
    known, first_visits, size, error, known_size, change, memory, senders, gain, dimensions = sums
    inner = (known_size + memory - change) / 2
    return ErrorStats(
        int(known),
        int(first_visits),
        error=_ratio(error, size),
        change=_ratio(change, known_size),
        cosine=_quotient(inner, math.sqrt(known_size) * math.sqrt(memory)),
        gain=_quotient(gain, senders),
        dimensions=_quotient(dimensions, senders),
    )


def _square(x_1N: Tensor) -> float:
    return float(x_1N.norm()) ** 2


def _ratio(square: float, size: float) -> float | None:
    ratio = _quotient(square, size)
    return None if ratio is None else math.sqrt(ratio)


def _quotient(value: float, size: float) -> float | None:
    ratio = value / size if size > 0 else math.nan
    return ratio if math.isfinite(ratio) else None
