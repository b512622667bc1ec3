"""Detects that compression gets worse instead of better, and gives a cut more bits.

After each step every rank judges the same shared numbers by the same rule, so both ends of a cut
change at the same step without a message. What is judged are means over recent steps of a
direction's error and, where changes are coded, of their size. A mean is trusted after `patience`
measurements.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from thinpipe.pipeline.comm.error_stats import ErrorStats
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.wire.header import DIRECTIONS

_log = logging.getLogger(__name__)

CutDirection = tuple[int, int]
"""Cut and direction."""


class GuardConfig(BaseModel):
    """When a direction of a cut counts as failing, and what then.

    It fails when its relative error exceeds `error`, or when the relative size of changes is `rise`
    times the smallest it has been and more than a quarter, both in the mean over about `patience`
    steps. `warn` logs it once; `act` also continues with stateless tiles of two bits more, and with
    7 bits if these fail too; `off` checks nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["off", "warn", "act"] = "warn"
    error: float = Field(0.6, gt=0)
    rise: float = Field(1.5, gt=1)
    patience: int = Field(20, ge=1)


_LEAST_CHANGE = 0.25


class Rule(NamedTuple):
    """How a direction is judged, and how often its codec can be changed."""

    config: GuardConfig
    fallbacks: int


@dataclass
class _Track:
    """Means of a direction over about `patience` steps, since its codec changed last."""

    measured: int = 0
    error: float = 0.0
    changes: int = 0
    change: float = 0.0
    smallest: float = math.inf
    level: int = 0
    warned: bool = False

    def follow(self, seen: ErrorStats, patience: int) -> None:
        if seen.error is not None:
            self.measured += 1
            self.error += (seen.error - self.error) / min(self.measured, patience)
        if seen.change is not None:
            self.changes += 1
            self.change += (seen.change - self.change) / min(self.changes, patience)
            if self.changes >= patience:
                self.smallest = min(self.smallest, self.change)

    def problem(self, config: GuardConfig) -> str | None:
        """What is wrong, in words."""
        if self.measured >= config.patience and self.error > config.error:
            return f"the error is {self.error:.2f} of the values, the limit is {config.error:g}"
        limit = max(config.rise * self.smallest, _LEAST_CHANGE)
        if self.changes >= config.patience and self.change > limit:
            return (
                f"changes have grown from {self.smallest:.2f} to {self.change:.2f} of the "
                "activations instead of shrinking"
            )
        return None


class Guard:
    """Judges all directions of all cuts; changes those that end on this rank."""

    def __init__(self, rules: Mapping[CutDirection, Rule], codecs: Sequence[MessageCodec]) -> None:
        """`rules` are the same on every rank, `codecs` are those of this one."""
        self._rules, self._codecs = dict(rules), list(codecs)
        self._tracks = {place: _Track() for place in self._rules}

    def judge(self, signals: Mapping[CutDirection, ErrorStats]) -> list[str]:
        """Take in a step's numbers; returns what a user should know, on every rank alike."""
        return [
            note
            for place, rule in self._rules.items()
            if rule.config.mode != "off"
            for note in self._judge(place, rule, signals[place])
        ]

    def state_dict(self) -> dict[str, Any]:
        """Every direction's means and level."""
        return {f"{cut}.{way}": asdict(track) for (cut, way), track in self._tracks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them, and the levels of this rank's codecs; others start from scratch."""
        for place in self._tracks:
            saved = state.get(f"{place[0]}.{place[1]}")
            self._tracks[place] = _Track(**saved) if saved else _Track()
            self._set_level(place, self._tracks[place].level)

    def _judge(self, place: CutDirection, rule: Rule, seen: ErrorStats) -> list[str]:
        track, config = self._tracks[place], rule.config
        track.follow(seen, config.patience)
        problem = track.problem(config)
        if problem is None:
            return []
        where = f"cut {place[0]} {DIRECTIONS[place[1]]}: {problem}"
        if config.mode == "act" and track.level < rule.fallbacks:
            self._tracks[place] = _Track(level=track.level + 1)
            self._set_level(place, track.level + 1)
            return self._warn(f"{where}; it goes on stateless, with more bits")
        if track.warned:
            return []
        track.warned = True
        advice = 'use more bits, or guard.mode = "act"' if config.mode == "warn" else "use raw"
        return self._warn(f"{where}; {advice}")

    def _set_level(self, place: CutDirection, level: int) -> None:
        for codec in self._codecs:
            if (codec.cut, codec.direction) == place:
                codec.escalate(level)

    @staticmethod
    def _warn(text: str) -> list[str]:
        _log.warning("%s", text)
        return [text]
