"""What became of faults."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.harness import format_table

Verdict = Literal["survived", "rejected", "lost", "silent"]
"""survived: the newest whole state, or the same losses as without the fault. rejected: by name.
lost: a state that was published cannot be had any more. silent: something wrong was taken."""


@dataclass(frozen=True)
class Outcome:
    kind: str
    verdict: Verdict
    detail: str = ""


def restored(kind: str, found: Sequence[tuple[int, bool] | str], newest: int) -> Outcome:
    """Machines restored (step, whether right) or rejected; `newest` is the least they must have."""
    if any(isinstance(result, str) for result in found):
        return Outcome(kind, "lost" if newest else "rejected", f"{newest} was whole: {found}")
    (step, _), *_ = found
    if set(found) != {(step, True)}:
        return Outcome(kind, "silent", str(found))
    return Outcome(kind, "lost" if step < newest else "survived", f"{newest} was whole: {found}")


def check(outcomes: Sequence[Outcome]) -> None:
    """Print a table by kind; nothing may be lost or silent."""
    kinds = sorted({outcome.kind.partition(",")[0] for outcome in outcomes})
    rows = []
    for kind in kinds:
        found = Counter(o.verdict for o in outcomes if o.kind.partition(",")[0] == kind)
        rows.append([kind, str(found.total()), *(str(found[name]) for name in get_args(Verdict))])
    print(format_table(["fault", "injected", *get_args(Verdict)], rows))
    assert not [outcome for outcome in outcomes if outcome.verdict in ("lost", "silent")]
