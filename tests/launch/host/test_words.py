"""How numbers are written."""

import math

import pytest

from thinpipe.launch.host.words import (
    format_bytes,
    format_count,
    format_duration,
    format_loss,
    format_ratio,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(999), "999 B"),
        (format_bytes(1000), "1.00 kB"),
        (format_bytes(12_345), "12.3 kB"),
        (format_bytes(999_600), "1.00 MB"),
        (format_bytes(4.5e18), "4500 PB"),
        (format_count(124_439_808), "124 M"),
        (format_ratio(7.94), "7.9\N{MULTIPLICATION SIGN}"),
        (format_ratio(None), "-"),
        (format_loss(math.nan), "-"),
        (format_loss(2.5), "2.5000"),
        (format_duration(0.01234), "12.3 ms"),
        (format_duration(0.9999), "1 s"),
        (format_duration(1.268), "1.27 s"),
        (format_duration(59.7), "1 min 00 s"),
        (format_duration(7500), "2 h 05 min"),
    ],
)
def test_numbers_are_shown_with_the_right_unit(text: str, expected: str) -> None:
    assert text == expected
