"""How numbers are written."""

import math

from thinpipe.launch.host.words import (
    format_bytes,
    format_count,
    format_duration,
    format_loss,
    format_ratio,
)


def test_numbers_are_shown_with_the_right_unit() -> None:
    sizes = [format_bytes(size) for size in (0, 999, 1000, 12_345, 999_600, 4.5e18)]
    assert sizes == ["0 B", "999 B", "1.00 kB", "12.3 kB", "1.00 MB", "4500 PB"]
    assert [format_count(count) for count in (0, 950, 124_439_808)] == ["0", "950", "124 M"]
    ratios = [format_ratio(ratio) for ratio in (7.94, None)]
    assert ratios == ["7.9\N{MULTIPLICATION SIGN}", "-"]
    assert [format_loss(loss) for loss in (math.nan, 2.5)] == ["-", "2.5000"]
    times = [format_duration(time_s) for time_s in (0.01234, 0.9999, 1.268, 59.7, 7500)]
    assert times == ["12.3 ms", "1 s", "1.27 s", "1 min 00 s", "2 h 05 min"]
