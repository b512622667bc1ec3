import json
import math
import re
from html import unescape

import pytest

from thinpipe.launch.view.report.smoothing import smoothed
from thinpipe.launch.view.report.svg import Chart, Line


def data_of(svg: str) -> dict[str, list[str]]:
    found = re.search(r'data-chart="([^"]*)"', svg)
    assert found
    data: dict[str, list[str]] = json.loads(unescape(found[1]))
    return data


def test_every_step_has_its_values_under_the_pointer() -> None:
    chart = Chart(
        "Loss", [3, 4, 5], [Line("a<b", [1.0, math.nan, 2.0]), Line("c", [4.0, 5.0, 6.0], 1)]
    )
    svg = chart.svg()
    assert data_of(svg)["t"] == ["step 3: a<b 1, c 4", "step 4: c 5", "step 5: a<b 2, c 6"]
    assert "a<b" not in svg


def test_a_long_run_is_thinned_out_but_keeps_marks_and_the_end() -> None:
    marks = [math.nan] * 5000
    marks[1234] = 0.5
    chart = Chart("Loss", range(5000), [Line("l", [1.0] * 5000), Line("eval", marks, 1, "disc")])
    texts = data_of(chart.svg())["t"]
    assert len(texts) < 700
    assert "step 1,234: l 1, eval 0.5" in texts
    assert texts[-1].startswith("step 4,999")


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [math.nan, math.inf], [1e-9, 1e9]])
@pytest.mark.parametrize("log", [False, True])
def test_any_values_give_finite_places(values: list[float], log: bool) -> None:
    svg = Chart("c", range(len(values)), [Line("l", values)], log=log).svg()
    assert "nan" not in svg.replace("Nothing", "")
    assert "inf" not in svg


def test_smoothing_keeps_a_straight_line_and_bends_at_no_end() -> None:
    line = [5.0 - 0.1 * i for i in range(40)]
    assert smoothed(line, 5) == pytest.approx(line)
    noisy = [value + (0.5 if i == 39 else 0.0) for i, value in enumerate(line)]
    last = smoothed(noisy, 5)
    assert last[-1] < last[-6]  # one high value at the end is no rise


def test_smoothing_leaves_out_what_is_no_number() -> None:
    assert smoothed([1.0, math.nan, 1.0, math.inf, 1.0], 1) == pytest.approx([1.0] * 5)
    assert all(math.isnan(value) for value in smoothed([math.nan, math.nan], 1))
