"""What compression does to values, measured where they are encoded.

The first row of a step is measured, and of a boundary with memory the first known one: enough to
follow a run, at the cost of a pass or two over one sample per step.

Axes: B samples, N values of a sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

SUMS = 6


@dataclass(frozen=True)
class ErrorStats:
    """What was measured of one direction of a cut in a step, over all replicas.

    `known` and `first_visits` count samples with and without history, `error` is |decoded - a| /
    |a| and `change` |a - m| / |a| of activations (or gradients) a and memories m; None if not
    measured.
    """

    known: int = 0
    first_visits: int = 0
    error: float | None = None
    change: float | None = None


@dataclass
class ErrorMeter:
    """Collects a step's sums at a sender: numbers that add up over replicas."""

    _known: int = 0
    _first_visits: int = 0
    _squares: list[float] = field(default_factory=lambda: [0.0] * 4)
    _seen: set[bool] = field(default_factory=set)

    def count(self, *, known: int, first_visits: int) -> None:
        """Samples that were sent."""
        self._known += known
        self._first_visits += first_visits

    def wants(self, *, known: bool) -> bool:
        """Whether no such row was measured in this step."""
        return known not in self._seen

    def measure(self, x_1N: Tensor, decoded_1N: Tensor, memory_1N: Tensor | None = None) -> None:
        """Take in what a row was, what the peer makes of it, and what both remembered."""
        self._seen.add(memory_1N is not None)
        x_1N = x_1N.float()
        size, error = _square(x_1N), _square(decoded_1N.float() - x_1N)
        sums = [size, error, 0.0, 0.0]
        if memory_1N is not None:
            sums[2:] = size, _square(memory_1N.float() - x_1N)
        self._squares = [a + b for a, b in zip(self._squares, sums, strict=True)]

    def take(self) -> list[float]:
        """The `SUMS` numbers since the last call, counted from zero again."""
        taken = [float(self._known), float(self._first_visits), *self._squares]
        self._known, self._first_visits, self._squares, self._seen = 0, 0, [0.0] * 4, set()
        return taken


def error_stats(sums: Sequence[float]) -> ErrorStats:
    """Ratios from added-up `ErrorMeter.take`s."""
    known, first_visits, size, error, known_size, change = sums
    return ErrorStats(
        int(known), int(first_visits), _ratio(error, size), _ratio(change, known_size)
    )


def _square(x_1N: Tensor) -> float:
    return float(x_1N.norm()) ** 2


def _ratio(square: float, size: float) -> float | None:
    ratio = math.sqrt(square / size) if size > 0 else math.nan
    return ratio if math.isfinite(ratio) else None
