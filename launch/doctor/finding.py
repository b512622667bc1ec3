"""What an examination finds: good or not, where, and what to do."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. A problem stops a run, a warning slows it; both have a remedy."""

    level: Level
    where: str
    text: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """What another host needs to show it."""
        return asdict(self)


def ok(where: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", where, text)


def warning(where: str, text: str, remedy: str) -> Finding:
    """It will run, but slowly or not for long."""
    return Finding("warning", where, text, remedy)


def problem(where: str, text: str, remedy: str) -> Finding:
    """It will not run."""
    return Finding("problem", where, text, remedy)
