"""Rates and times as people write them."""

import pytest

from thinpipe.launch.host.links import format_rate, parse_rate, parse_time


@pytest.mark.parametrize(
    ("text", "bps"),
    [("100mbit", 100e6), ("1.5Gbit", 1.5e9), ("64 kbit", 64e3), ("9000bit", 9e3), ("none", None)],
)
def test_rates_are_read(text: str, bps: float | None) -> None:
    assert parse_rate(text) == bps


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("1s", 1.0), ("300us", 0.0003)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


def test_rates_are_formatted_with_units() -> None:
    assert [format_rate(bps) for bps in (1.5e9, 5e5, None)] == [
        "1.5 Gbit/s",
        "500 kbit/s",
        "unlimited",
    ]
