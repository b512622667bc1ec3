"""A sample of the chaos suite: no published state is lost, and nothing wrong is taken."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import files, kills
from benchmarks.chaos.outcome import Outcome, table
from benchmarks.chaos.soak import QUANTITIES, Sample, growth, show_growth


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


@pytest.mark.slow
@pytest.mark.dist
def test_runs_on_emulated_hosts_are_disturbed(tmp_path: Path) -> None:
    out = tmp_path / "outcomes.jsonl"
    words = [sys.executable, "-m", "benchmarks.chaos", "--files", "0", "--kills", "0"]
    words += ["--live", "6", "--seed", "5", "--out", str(out)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=900
    )  # a process of its own: it mounts
    if "ShapedError" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert out.read_text(encoding="utf-8").count("\n") >= 6
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--show", str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "| end of a run |" in shown.stdout


def test_a_table_counts_by_kind_and_verdict() -> None:
    found = [
        Outcome("a, early", "survived", seconds=3.0, said_s=0.5),
        Outcome("a, late", "lost"),
        Outcome("b", "refused"),
    ]
    lines = table(found).splitlines()
    assert lines[2:] == [
        "| a | 2 | 1 | 0 | 1 | 0 | 0.5 / 0.5 / 0.5 | 3.0 / 3.0 / 3.0 |",
        "| b | 1 | 0 | 1 | 0 | 0 |  |  |",
    ]


def test_growth_is_a_slope_per_thousand_steps() -> None:
    samples = [Sample(step, 0, "rank", 100 + step / 500, 30, 8) for step in range(0, 4000, 100)]
    rows = {row["quantity"]: row for row in growth(samples)}
    assert rows.keys() == set(QUANTITIES)
    assert rows["pss_mb"]["slope"] == pytest.approx(2)
    assert rows["descriptors"]["slope"] == 0
    assert "| rank | pss_mb | 100.9 | 106.9 | 107.8 | +2.00 |" in show_growth([rows["pss_mb"]])
