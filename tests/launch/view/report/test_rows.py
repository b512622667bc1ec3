import math
from dataclasses import replace

import pytest

from tests.records import step_record, wire_totals
from thinpipe.launch.view.report.rows import Rows

MOST_ROWS = 400


def test_a_short_run_has_a_row_for_every_step() -> None:
    first = step_record(1, loss=math.inf, skipped=True, wire=wire_totals([6], channel_error=0.5))
    columns = Rows([first, step_record(2, loss=2.0, eval={"loss": 1.5, "accuracy": 1.0})]).columns()
    assert columns["step"] == [1, 2]
    assert columns["loss"] == [None, 2.0]
    assert (columns["skipped"], columns["eval"]) == ([1.0, None], [None, 1.5])
    assert (columns["6 forward"], columns["channel_error forward"]) == ([1000, None], [0.5, None])
    assert not {"low", "high", "accuracy"} & columns.keys()


@pytest.fixture
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinpipe.launch.view.report.rows.MOST_ROWS", MOST_ROWS)


@pytest.mark.usefixtures("_few_rows")
def test_a_long_run_is_thinned_out_but_keeps_extremes_marks_and_the_end() -> None:
    records = [step_record(step, loss=2.0 + step % 2) for step in range(1, 2001)]
    records[1234] = replace(records[1234], loss=99.0, eval={"loss": 0.5}, skipped=True)
    rows = Rows(records)
    columns = rows.columns()
    assert MOST_ROWS / 2 <= len(columns["step"]) < MOST_ROWS
    assert rows.stride == 8
    assert (columns["step"][0], columns["step"][-1]) == (8, 2000)
    assert (columns["low"][0], columns["loss"][0], columns["high"][0]) == (2.0, 2.5, 3.0)
    row = columns["eval"].index(0.5)
    assert (columns["high"][row], columns["skipped"][row]) == (99.0, 1.0)
    assert abs(columns["step"][row] - 1235) < 8


@pytest.mark.usefixtures("_few_rows")
def test_the_row_that_is_not_full_changes_with_each_step() -> None:
    rows = Rows([step_record(step) for step in range(1, MOST_ROWS + 1)])
    assert (rows.stride, len(rows.columns()["step"])) == (2, MOST_ROWS // 2)
    rows.add(step_record(MOST_ROWS + 1, loss=4.0))
    assert rows.columns()["loss"][-1] == 4.0
    rows.add(step_record(MOST_ROWS + 2, loss=6.0))
    assert rows.columns()["loss"][-1] == 5.0
    assert rows.columns()["step"][-1] == MOST_ROWS + 2
