import time

import pytest

from tests.ranks import run_ranks
from thinpipe.launch.net.ranks import clock
from thinpipe.pipeline.comm.gloo import GlooTransport

pytestmark = pytest.mark.dist


class _SkewedTime:
    """A host whose clock is ahead."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def perf_counter(self) -> float:
        return time.perf_counter() + self._ahead_s


def _measure(rank: int) -> float:
    clock.time = _SkewedTime(100.0 * rank)  # type: ignore[assignment]
    return clock.seconds_ahead(GlooTransport(3, 1, timeout_s=120))


def test_clocks_are_compared_with_the_first_rank() -> None:
    assert run_ranks(3, _measure) == pytest.approx([0.0, 100.0, 200.0], abs=5)
