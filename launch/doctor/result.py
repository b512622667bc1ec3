"""Result of a check: its level, where, and the remedy."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the report. A problem prevents a run, a warning may slow it down."""

    level: Level
    where: str
    text: str
    remedy: str = ""


def ok(where: str, text: str) -> CheckResult:
    """A check that passed."""
    return CheckResult("ok", where, text)


def warning(where: str, text: str, remedy: str) -> CheckResult:
    """The run will start, but may be slow or fail later."""
    return CheckResult("warning", where, text, remedy)


def problem(where: str, text: str, remedy: str) -> CheckResult:
    """The run cannot start."""
    return CheckResult("problem", where, text, remedy)
