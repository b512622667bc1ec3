"""What is measured of a row: all of it, its channels, and which of them are massive."""

import math

import pytest
import torch

from thinpipe.pipeline.comm.error_stats import SUMS, ErrorMeter, error_stats
from thinpipe.pipeline.wire.told import ErrorStats


def row(tokens: int = 16, width: int = 32) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))


def measured(
    x: torch.Tensor, decoded: torch.Tensor, memory: torch.Tensor | None = None
) -> ErrorStats:
    meter = ErrorMeter()
    meter.measure(x, decoded, memory)
    return error_stats(meter.take())


def test_a_massive_channel_does_not_hide_that_the_others_are_lost() -> None:
    x = row()
    x[:, 7] *= 1000
    decoded = x.clone()
    decoded[:, torch.arange(32) != 7] = 0
    found = measured(x, decoded)
    assert found.error is not None
    assert found.error < 0.01
    assert found.channel_error == pytest.approx(1)
    assert (found.largest_channel, found.massive_tokens) == (7, 0)
    assert found.largest_share == pytest.approx(float(x[:, 7].norm() / x.norm()) ** 2)


def test_a_massive_token_is_counted_and_kept_out_of_the_channels() -> None:
    x = row()
    x[3] *= 1000
    decoded = 1.1 * x
    decoded[3] = 0
    found = measured(x, decoded, 0.8 * x)
    assert found.massive_tokens == 1
    assert found.error == pytest.approx(1, abs=1e-3)
    assert (found.channel_error, found.worst_error) == pytest.approx((0.1, 0.1))
    assert (found.channel_change, found.change) == pytest.approx((0.2, 0.2))
    assert found.cosine == pytest.approx(1)


def test_the_worst_channel_is_named() -> None:
    x, decoded = row(), row()
    decoded[:, 5] *= 3
    found = measured(x, decoded)
    assert (found.worst_channel, found.channel_error) == (5, 0)
    assert found.worst_error == pytest.approx(2)


def test_channels_and_tokens_without_values_do_not_count() -> None:
    x = row()
    x[:, 20:], x[10:] = 0, 0
    decoded = 1.5 * x
    decoded[:, 20:] = 1
    found = measured(x, decoded)
    assert found.channel_error == pytest.approx(0.5)
    assert found.massive_tokens == 0
    assert measured(torch.zeros(4, 4), torch.zeros(4, 4)) == ErrorStats()
    assert measured(torch.full((4, 4), math.nan), torch.zeros(4, 4)) == ErrorStats()
    assert measured(row(1, 1), row(1, 1)).error == 0


def test_senders_together_say_what_each_saw() -> None:
    """Sums of squares, means of medians, and of the rest the sender with the larger number."""
    x, taken = row(), []
    for factor, channel in ((1.1, 3), (1.3, 9)):
        meter, own = ErrorMeter(), x.clone()
        own[:, channel] *= 100 * factor
        meter.count(known=1, first_visits=2)
        meter.measure(own, factor * own, own)
        taken.append(meter.take())
    found = error_stats(*taken, [0.0] * SUMS)
    assert (found.known, found.first_visits, found.change) == (2, 4, 0)
    assert found.channel_error == pytest.approx(0.2)
    assert found.worst_error == pytest.approx(0.3)
    assert (found.largest_channel, found.gain) == (9, None)
    assert error_stats(*taken, *taken).channel_error == found.channel_error
    assert error_stats([0.0] * SUMS) == error_stats() == ErrorStats()
