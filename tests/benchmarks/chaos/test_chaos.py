"""A sample of the chaos suite: no published state is lost, and nothing wrong is taken."""

from pathlib import Path

import pytest

from benchmarks.chaos import files, kills
from benchmarks.chaos.outcome import Outcome, table


def bad(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.verdict in ("lost", "silent")]


def test_damaged_missing_and_mixed_files(tmp_path: Path) -> None:
    outcomes = files.inject(tmp_path, 15, seed=1)
    assert not bad(outcomes)
    assert {outcome.verdict for outcome in outcomes} <= {"survived", "refused"}


@pytest.mark.slow
@pytest.mark.dist
def test_machines_killed_while_they_save(tmp_path: Path) -> None:
    outcomes = kills.inject(tmp_path, 40, seed=1)
    assert not bad(outcomes)
    assert {outcome.verdict for outcome in outcomes} == {"survived"}


def test_a_table_counts_by_kind_and_verdict() -> None:
    found = [Outcome("a", "survived", seconds=3.0), Outcome("a", "lost"), Outcome("b", "refused")]
    lines = table(found).splitlines()
    assert lines[2:] == [
        "| a | 2 | 1 | 0 | 1 | 0 | 3.0 / 3.0 / 3.0 |",
        "| b | 1 | 0 | 1 | 0 | 0 |  |",
    ]
