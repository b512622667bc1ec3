"""Result of a check: its level, where, and the remedy."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the report. A problem prevents a run, a warning may slow it down."""

    level: Level
    where: str
    text: str
    remedy: str = ""


ok = partial(CheckResult, "ok")
"""A check that passed."""
warning = partial(CheckResult, "warning")
"""The run will start, but may be slow or fail later."""
problem = partial(CheckResult, "problem")
"""The run cannot start."""
