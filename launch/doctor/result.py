"""Result of a check: its level, where, and the remedy."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the report. A problem prevents a run, a warning may slow it down."""

    level: Level
    where: str
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON, to send to other hosts."""
        return asdict(self)


def ok(where: str, text: str) -> CheckResult:
    """A check that passed."""
    return CheckResult("ok", where, text)


def warning(where: str, text: str, remedy: str) -> CheckResult:
    """The run will start, but may be slow or fail later."""
    return CheckResult("warning", where, text, remedy)


def problem(where: str, text: str, remedy: str) -> CheckResult:
    """The run cannot start."""
    return CheckResult("problem", where, text, remedy)
