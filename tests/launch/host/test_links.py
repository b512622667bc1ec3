"""Rates and times as people write them."""

import pytest

from thinpipe.launch.host.links import format_rate, parse_rate, parse_time


@pytest.mark.parametrize(
    ("text", "bps", "said"),
    [
        ("100mbit", 100e6, "100 Mbit/s"),
        ("1.5Gbit", 1.5e9, "1.5 Gbit/s"),
        ("64 kbit", 64e3, "64 kbit/s"),
        ("9000bit", 9e3, "9 kbit/s"),
        ("none", None, "unlimited"),
    ],
)
def test_rates_are_read_and_written(text: str, bps: float | None, said: str) -> None:
    assert (parse_rate(text), format_rate(bps)) == (bps, said)


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("1s", 1.0), ("300us", 0.0003)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)
