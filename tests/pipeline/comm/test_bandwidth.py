"""Measuring a link between two ranks."""

import pytest

from tests.ranks import Ranks
from thinpipe.pipeline.comm.bandwidth import measure_rate
from thinpipe.pipeline.comm.gloo import GlooTransport


def _both_ways(rank: int) -> list[float | None]:
    transport = GlooTransport(2, 1, timeout_s=60)
    return [measure_rate(transport, 1 - rank, sending=rank == sender) for sender in (0, 1)]


@pytest.mark.dist
def test_the_sender_learns_the_rate_of_its_direction(ranks: Ranks) -> None:
    (forward, nothing), (none, backward) = ranks(2, _both_ways)
    assert nothing is None
    assert none is None
    assert forward is not None
    assert backward is not None
    assert 0 < min(forward, backward) <= max(forward, backward) < 1e12
