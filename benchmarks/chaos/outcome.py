"""What became of a fault."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

VERDICTS: tuple["Verdict", ...] = ("survived", "refused", "lost", "silent")

Verdict = Literal["survived", "refused", "lost", "silent"]
"""survived: the newest whole state, or the same losses as without the fault. refused: by name.
lost: a state that was published cannot be had any more. silent: something wrong was taken."""


@dataclass(frozen=True)
class Outcome:
    """One fault; `seconds` is from the fault to the next step, where there is one."""

    kind: str
    verdict: Verdict
    detail: str = ""
    seconds: float | None = None


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: counts by kind, and times."""
    by_kind: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_kind.setdefault(outcome.kind, []).append(outcome)
    lines = [
        "| fault | injected | survived | refused by name | lost | silent | s to next step |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, found in sorted(by_kind.items()):
        counts = Counter(outcome.verdict for outcome in found)
        times = sorted(o.seconds for o in found if o.seconds is not None)
        spread = f"{times[0]:.1f} / {times[len(times) // 2]:.1f} / {times[-1]:.1f}" if times else ""
        numbers = (
            len(found),
            *(counts[name] for name in ("survived", "refused", "lost", "silent")),
        )
        lines.append(f"| {kind} | {' | '.join(map(str, numbers))} | {spread} |")
    return "\n".join(lines)
