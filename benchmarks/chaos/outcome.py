"""What became of a fault, and tables of many."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

VERDICTS: tuple["Verdict", ...] = ("survived", "refused", "lost", "silent")

Verdict = Literal["survived", "refused", "lost", "silent"]
"""survived: the newest whole state, or the same losses as without the fault. refused: by name.
lost: a state that was published cannot be had any more. silent: something wrong was taken."""


@dataclass(frozen=True)
class Outcome:
    """One fault. `seconds` is from the fault to the next step, where there is one, `said_s` to the
    first message that names it, `ended_s` to the end of all launchers.
    """

    kind: str
    verdict: Verdict
    detail: str = ""
    seconds: float | None = None
    said_s: float | None = None
    ended_s: float | None = None
    layout: str = ""


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: counts by kind, and times; the moments of one kind of fault are taken together."""
    lines = [
        "| fault | injected | survived | refused by name | lost | silent "
        "| s to the message | s to the next step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, found in sorted(_by_kind(outcomes).items()):
        counts = Counter(outcome.verdict for outcome in found)
        cells = [kind, str(len(found)), *(str(counts[name]) for name in VERDICTS)]
        said = [o.said_s for o in found if o.said_s is not None]
        seconds = [o.seconds for o in found if o.seconds is not None]
        lines.append(f"| {' | '.join([*cells, _spread(said), _spread(seconds)])} |")
    return "\n".join(lines)


def _by_kind(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.kind.split(",")[0], []).append(outcome)
    return found


def _spread(seconds: Sequence[float]) -> str:
    """10 %, median, 90 %, most; of few, least, median and most."""
    if not seconds:
        return ""
    ordered, last = sorted(seconds), len(seconds) - 1
    places = (0.1, 0.5, 0.9, 1.0) if len(seconds) >= 10 else (0.0, 0.5, 1.0)
    return " / ".join(f"{ordered[round(place * last)]:.1f}" for place in places)
