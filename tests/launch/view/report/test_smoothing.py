import math

import pytest

from thinpipe.launch.view.report.rows import smoothed


def test_smoothing_keeps_a_straight_line_and_bends_at_no_end() -> None:
    line = [5.0 - 0.1 * i for i in range(40)]
    assert smoothed(line, 5) == pytest.approx(line)
    noisy = [value + (0.5 if i == 39 else 0.0) for i, value in enumerate(line)]
    last = smoothed(noisy, 5)
    assert last[-1] < last[-6]  # one high value at the end is no rise


def test_smoothing_leaves_out_what_is_no_number() -> None:
    assert smoothed([1.0, math.nan, 1.0, math.inf, 1.0], 1) == pytest.approx([1.0] * 5)
    assert all(math.isnan(value) for value in smoothed([math.nan, math.nan], 1))
