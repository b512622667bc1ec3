"""Detects that compression gets worse instead of better.

After each step every rank judges the same shared numbers. What is judged are means over recent
steps of a direction's error and, where changes are coded, of their size.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from thinpipe.pipeline.comm.error_stats import ErrorStats
from thinpipe.pipeline.wire.header import DIRECTIONS

_log = logging.getLogger(__name__)

CutDirection = tuple[int, int]
"""Cut and direction."""


# AQ-SGD at 2 bits with levels that fail grows from 0.23 to 0.47 of the activations; with ones that
# hold changes shrink from 0.20 to 0.11 (benchmarks/results/aqsgd_convergence_cpu_202611.md)
_ERROR, _RISE, _LEAST_CHANGE, _PATIENCE = 0.6, 1.5, 0.25, 20


@dataclass
class _Track:
    """Means of a direction over about `_PATIENCE` steps."""

    measured: int = 0
    error: float = 0.0
    changes: int = 0
    change: float = 0.0
    smallest: float = math.inf
    warned: bool = False

    def follow(self, seen: ErrorStats) -> None:
        if seen.error is not None:
            self.measured += 1
            self.error += (seen.error - self.error) / min(self.measured, _PATIENCE)
        if seen.change is not None:
            self.changes += 1
            self.change += (seen.change - self.change) / min(self.changes, _PATIENCE)
            if self.changes >= _PATIENCE:
                self.smallest = min(self.smallest, self.change)

    def problem(self) -> str | None:
        """The problem in words."""
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

    def __init__(self, places: Collection[CutDirection]) -> None:
        """`places` are the directions to judge."""
        self._tracks = {place: _Track() for place in places}

    def judge(self, signals: Mapping[CutDirection, ErrorStats]) -> list[str]:
        """Take in a step's numbers; returns what a user should know."""
        notes = []
        for place, track in self._tracks.items():
            track.follow(signals[place])
            problem = track.problem()
            if problem is not None and not track.warned:
                track.warned = True
                where = f"cut {place[0]} {DIRECTIONS[place[1]]}"
                notes.append(f"{where}: {problem}; use more bits, or raw")
                _log.warning("%s", notes[-1])
        return notes

    def state_dict(self) -> dict[str, Any]:
        return {f"{cut}.{way}": asdict(track) for (cut, way), track in self._tracks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the means; directions that the state does not know start from scratch."""
        for cut, way in self._tracks:
            saved = dict(state.get(f"{cut}.{way}", {}))
            saved.pop("level", None)  # of checkpoints whose guard could change codecs
            self._tracks[cut, way] = _Track(**saved)
