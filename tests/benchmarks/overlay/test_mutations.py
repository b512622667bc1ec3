"""No changed bit of anything that hosts send each other is taken for true."""

from pathlib import Path

import pytest

from benchmarks.overlay import mutations


def test_no_changed_bit_is_taken_for_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "PER_KIND", 250)
    rows = list(mutations.mutations(tmp_path))
    assert len(rows) == 14
    for row in rows:
        assert row.refused + row.changed_nothing == row.mutations == 250, row
        assert "hello" in row.kind or "answer" in row.kind or row.changed_nothing == 0, row
