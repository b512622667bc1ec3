"""Processes that give no sign of life, and those that only seem so."""

import pytest
from torch.distributed import HashStore

from thinpipe.launch.run.elastic import beats
from thinpipe.launch.run.elastic.beats import Beats


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(beats, "time", clock)
    return clock


def passes(clock: Clock, seconds: int, *processes: Beats) -> list[list[int]]:
    """What each process finds silent at the end."""
    found: list[list[int]] = []
    for _ in range(4 * seconds):
        clock.now_s += 0.25
        found = [
            process.silent([2, 5, 7]) or before
            for process, before in zip(processes, found or [[]] * len(processes), strict=True)
        ]
    return found


def test_who_stops_counting_is_silent(clock: Clock) -> None:
    store = HashStore()
    first, second, third = (Beats(store, member, 5) for member in (2, 5, 7))
    assert passes(clock, 30, first, second, third) == [[], [], []]
    assert passes(clock, 7, first, second) == [[], []], "beats may be late"
    assert passes(clock, 3, first, second) == [[7], []]
    assert passes(clock, 10, second, third) == [[2], []], "the second looks at the first"


def test_who_never_counted_is_starting(clock: Clock) -> None:
    assert passes(clock, 60, Beats(HashStore(), 2, 5)) == [[]]


def test_a_process_that_paused_does_not_blame_the_others(clock: Clock) -> None:
    store = HashStore()
    first, second = Beats(store, 2, 5), Beats(store, 5, 5)
    passes(clock, 3, first, second)
    clock.now_s += 60
    assert first.silent([2, 5]) == []
    assert passes(clock, 4, first, second) == [[], []]
    assert passes(clock, 9, first) == [[5]]
