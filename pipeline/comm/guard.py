"""Detects that compression gets worse instead of better, or never suited what crosses a cut.

After each step every rank judges the same shared numbers. What is judged are means over recent
steps of a direction's error, of that of its single channels and, where changes are coded, of their
size.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from thinpipe.pipeline.wire.told import DIRECTIONS, ErrorStats

_log = logging.getLogger(__name__)

CutDirection = tuple[int, int]

# AQ-SGD at 2 bits with levels that fail grows from 0.23 to 0.47 of the activations; with ones that
# hold changes shrink from 0.20 to 0.11 (benchmarks/results/aqsgd_convergence_cpu_202611.md)
_ERROR, _RISE, _LEAST_CHANGE, _PATIENCE = 0.6, 1.5, 0.25, 20
_REMEDY = "use more bits (transform: a smaller step), or raw"
# SmolLM2-135M before training, across three cuts: its loss rises by .01 where half of the channels
# have errors up to .17 of their own, by .1 at .25, by .2 at .4 and by .7 and more from .5 on
_CHANNEL_ERROR, _LARGE_SHARE = 0.25, 0.25


@dataclass
class _Track:
    """Means of a direction over about `_PATIENCE` steps."""

    measured: int = 0
    error: float = 0.0
    changes: int = 0
    change: float = 0.0
    smallest: float = math.inf
    channel_error: float = 0.0
    share: float = 0.0
    channel: int | None = None
    warned: bool = False
    unsuited: bool = False

    def follow(self, seen: ErrorStats) -> None:
        if seen.error is not None:
            self.measured += 1
            self.error += self._part(seen.error, self.error)
            self.channel_error += self._part(seen.channel_error, self.channel_error)
            self.share += self._part(seen.largest_share, self.share)
            self.channel = seen.largest_channel
        if seen.change is not None:
            self.changes += 1
            self.change += (seen.change - self.change) / min(self.changes, _PATIENCE)
            if self.changes >= _PATIENCE:
                self.smallest = min(self.smallest, self.change)

    def _part(self, seen: float | None, mean: float) -> float:
        return ((seen or 0.0) - mean) / min(self.measured, _PATIENCE)

    def mismatch(self) -> str | None:
        """What of the values the codec is wrong for, in words."""
        if self.measured < _PATIENCE or self.share < _LARGE_SHARE:
            return None
        if self.channel_error < _CHANNEL_ERROR:
            return None
        return (
            f"channel {self.channel} holds {self.share:.0%} of the energy, and half of the others "
            f"have an error of {self.channel_error:.0%} of their own or more"
        )

    def problem(self) -> str | None:
        if self.measured >= _PATIENCE and self.error > _ERROR:
            return f"the error is {self.error:.2f} of the values, the limit is {_ERROR:g}"
        if self.changes >= _PATIENCE and self.change > max(_RISE * self.smallest, _LEAST_CHANGE):
            return (
                f"changes have grown from {self.smallest:.2f} to {self.change:.2f} of the "
                "activations instead of shrinking"
            )
        return None


class Guard:
    """Judges all directions of all cuts, on every rank alike."""

    def __init__(self, remedies: Mapping[CutDirection, str]) -> None:
        """`remedies` are what to use in the directions to judge, if a codec is wrong there."""
        self._tracks = {place: _Track() for place in remedies}
        self._remedies = remedies

    def judge(self, signals: Mapping[CutDirection, ErrorStats]) -> list[str]:
        notes = []
        for place, track in self._tracks.items():
            track.follow(signals[place])
            where = f"cut {place[0]} {DIRECTIONS[place[1]]}"
            problem, mismatch = track.problem(), track.mismatch()
            if problem is not None and not track.warned:
                track.warned = True
                notes.append(f"{where}: {problem}; {_REMEDY}")
            if mismatch is not None and not track.unsuited:
                track.unsuited = True
                notes.append(f"{where}: {mismatch}; {self._remedies[place]}")
        for note in notes:
            _log.warning("%s", note)
        return notes

    def state_dict(self) -> dict[str, Any]:
        return {f"{cut}.{way}": asdict(track) for (cut, way), track in self._tracks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the means; directions that the state does not know start from scratch."""
        for cut, way in self._tracks:
            saved = dict(state.get(f"{cut}.{way}", {}))
            saved.pop("level", None)  # of checkpoints whose guard could change codecs
            self._tracks[cut, way] = _Track(**saved)
