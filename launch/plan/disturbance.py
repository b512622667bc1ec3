"""Whether other work on a machine has made what was timed there too long, and by how much."""

import os
import statistics
import time
from collections.abc import Sequence

from thinpipe.launch.host.resources import busy_s
from thinpipe.launch.report.metrics import format_duration

_WIDE = 1.5
"""The ratio of upper to lower quartile from which on rounds of the same work spread widely."""
_IDLE_CORES = 0.25
"""What others keep busy on an idle machine, at most."""
_ALIKE = 1.15
"""Rounds up to so many times the shortest had the machine to themselves."""


class OtherWork:
    """Counts what others on this machine have computed since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores(self) -> float:
        """How many cores others have kept busy on average; 0 where the machine does not say."""
        wall_s, busy, own_s = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, busy - own_s) / wall_s

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), busy_s(), time.process_time()


def undisturbed(rounds_s: Sequence[float]) -> float:
    """The median of the rounds that took little longer than the shortest."""
    least_s = min(rounds_s)
    return statistics.median(round_s for round_s in rounds_s if round_s <= _ALIKE * least_s)


def disturbance(rounds_s: Sequence[Sequence[float]], *, others: float, threads: int) -> str | None:
    """What to say of the rounds of each of several pieces of work; None if nothing.

    `threads` worked on them while others kept so many cores busy.
    """
    cores = os.cpu_count() or 1
    crowded = threads + others > cores + _IDLE_CORES
    quartiles = [statistics.quantiles(rounds, n=4, method="inclusive") for rounds in rounds_s]
    if not crowded and all(upper <= _WIDE * lower for lower, _, upper in quartiles):
        return None
    spreads = [(min(rounds), q[2]) for rounds, q in zip(rounds_s, quartiles, strict=True)]
    least_s, upper_s = max(spreads, key=lambda spread: spread[1] / spread[0])
    too_long = max(upper_s / least_s, (threads + others) / cores)
    return (
        f"other work on this machine keeps {others:.1f} of its {cores} cores busy, and what takes "
        f"{format_duration(least_s)} once takes {format_duration(upper_s)} another time: times "
        f"may be {too_long:.1f} times too long; run again when it is idle"
    )
