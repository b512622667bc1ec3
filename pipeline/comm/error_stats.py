"""What compression does to values, measured where they are encoded.

The first row of a step is measured, and of a boundary with a cache the first known one: enough to
follow a run, at the cost of a few passes over one sample per step.

A norm over all values says little of a model with massive activations, where one channel of one
token can have nearly all the energy (Sun et al. 2024, arXiv 2402.17762). So each channel is also
measured against its own energy, without the tokens that are massive.

Axes: T tokens of a sample, D channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.pipeline.wire.told import MASSIVE, ErrorStats


class _Sums(NamedTuple):
    """A sender's step: what adds up, and of its rows the largest."""

    known: float = 0.0
    first_visits: float = 0.0
    size: float = 0.0
    error: float = 0.0
    known_size: float = 0.0
    change: float = 0.0
    memory: float = 0.0
    rows: float = 0.0
    channel_error: float = 0.0
    known_rows: float = 0.0
    channel_change: float = 0.0
    senders: float = 0.0
    gain: float = 0.0
    dimensions: float = 0.0
    worst_error: float = 0.0
    worst_channel: float = 0.0
    largest_share: float = 0.0
    largest_channel: float = 0.0
    massive_tokens: float = 0.0

    def plus(self, other: "_Sums") -> "_Sums":
        """Both taken together; of equal maxima the first one's channel is named."""
        added = [a + b for a, b in zip(self[:_ADDED], other[:_ADDED], strict=True)]
        worst = max(self[_ADDED : _ADDED + 2], other[_ADDED : _ADDED + 2], key=itemgetter(0))
        largest = max(self[_ADDED + 2 :], other[_ADDED + 2 :], key=itemgetter(0))
        return _Sums(*added, *worst, *largest)


SUMS = len(_Sums._fields)
_ADDED = _Sums._fields.index("worst_error")
_NOTHING = _Sums()


@dataclass
class ErrorMeter:
    """Collects a step's numbers at a sender.

    `spectrum` is what a transform last found: gain and dimensions.
    """

    spectrum: tuple[float, float] | None = None
    _sums: _Sums = _NOTHING
    _seen: set[bool] = field(default_factory=set)

    def count(self, *, known: int, first_visits: int) -> None:
        self._sums = self._sums.plus(_Sums(known, first_visits))

    def wants(self, *, known: bool) -> bool:
        """Whether no such row was measured in this step."""
        return known not in self._seen

    def measure(self, x_TD: Tensor, decoded_TD: Tensor, memory_TD: Tensor | None = None) -> None:
        """Take in what a row was, what the peer makes of it, and what both had cached.

        A row that is not finite counts for nothing.
        """
        self._seen.add(memory_TD is not None)
        found = _measured(x_TD.detach(), decoded_TD, memory_TD)
        if all(map(math.isfinite, found)):
            self._sums = self._sums.plus(found)

    def take(self) -> list[float]:
        """The `SUMS` numbers since the last call, counted from zero again."""
        taken = self._sums
        if self.spectrum and self._seen:
            taken = taken._replace(senders=1, gain=self.spectrum[0], dimensions=self.spectrum[1])
        self._sums, self._seen = _NOTHING, set()
        return list(map(float, taken))


def error_stats(*taken: Sequence[float]) -> ErrorStats:
    """What `ErrorMeter.take`s of one or more senders say together.

    Medians over channels and a transform's numbers are means over senders.
    """
    found = _NOTHING
    for numbers in taken:
        found = found.plus(_Sums(*numbers))
    inner = (found.known_size + found.memory - found.change) / 2
    measured = found.rows > 0
    return ErrorStats(
        int(found.known),
        int(found.first_visits),
        error=_ratio(found.error, found.size),
        change=_ratio(found.change, found.known_size),
        cosine=_quotient(inner, math.sqrt(found.known_size) * math.sqrt(found.memory)),
        channel_error=_quotient(found.channel_error, found.rows),
        channel_change=_quotient(found.channel_change, found.known_rows),
        worst_error=found.worst_error if measured else None,
        worst_channel=int(found.worst_channel) if measured else None,
        largest_channel=int(found.largest_channel) if measured else None,
        largest_share=found.largest_share if measured else None,
        massive_tokens=int(found.massive_tokens) if measured else None,
        gain=_quotient(found.gain, found.senders),
        dimensions=_quotient(found.dimensions, found.senders),
    )


def _measured(x_TD: Tensor, decoded_TD: Tensor, memory_TD: Tensor | None) -> _Sums:
    """The numbers of a row, which are brought to the host together.

    One buffer takes all squares in turn: fresh memory of a large sample costs more than they do.
    """
    x_TD = x_TD.float()
    square_TD = x_TD.square()
    energy_D, energy_T = square_TD.sum(0), square_TD.sum(1)
    least = MASSIVE * energy_T.where(energy_T > 0, torch.nan).nanmedian()
    rest_T = (energy_T <= least).float()
    rest_D = rest_T @ square_TD
    torch.sub(decoded_TD, x_TD, out=square_TD).square_()
    ratio_D = _of_own(rest_T @ square_TD, rest_D)
    worst, largest = ratio_D.nan_to_num(nan=0.0).max(0), energy_D.max(0)
    found = [
        energy_T.sum(), square_TD.sum(), ratio_D.nanmedian().nan_to_num(), worst.values,
        worst.indices, largest.values, largest.indices, (energy_T > least).sum(),
    ]  # fmt: skip
    if memory_TD is not None:
        torch.sub(memory_TD, x_TD, out=square_TD).square_()
        change = _of_own(rest_T @ square_TD, rest_D).nanmedian().nan_to_num()
        found += [square_TD.sum(), change, square_TD.copy_(memory_TD).square_().sum()]
    size, error, median, *named = torch.stack([each.double() for each in found]).tolist()
    worst_error, worst_channel, most, largest_channel, massive = named[:5]
    sums = _Sums(
        size=size, error=error, rows=1, channel_error=math.sqrt(median),
        worst_error=math.sqrt(worst_error), worst_channel=worst_channel,
        largest_share=most / size if size > 0 else math.nan,
        largest_channel=largest_channel, massive_tokens=massive,
    )  # fmt: skip
    if memory_TD is None:
        return sums
    change, channel_change, memory = named[5:]
    return sums._replace(
        known_size=size, change=change, memory=memory,
        known_rows=1, channel_change=math.sqrt(channel_change),
    )  # fmt: skip


def _of_own(square_D: Tensor, energy_D: Tensor) -> Tensor:
    """Each channel's part of its own energy; NaN for channels that have none."""
    return (square_D / energy_D).where(energy_D > 0, torch.nan)


def _ratio(square: float, size: float) -> float | None:
    ratio = _quotient(square, size)
    return None if ratio is None else math.sqrt(ratio)


def _quotient(value: float, size: float) -> float | None:
    ratio = value / size if size > 0 else math.nan
    return ratio if math.isfinite(ratio) else None
