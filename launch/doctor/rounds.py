"""The order in which links are measured: rounds of disjoint pairs, each host in one at a time.

The circle method of round-robin tournaments: one host stays, the others move on by a place each
round. So N hosts need N - 1 rounds (N of them if N is odd), and every pair meets once.
"""

import time
from collections.abc import Callable, Iterator

from thinpipe.launch.host.links import Pair
from thinpipe.launch.host.words import format_duration

_PAUSE_S = 5.0


def rounds(hosts: int) -> list[list[Pair]]:
    """All pairs (lower, higher) of `hosts`, in rounds of pairs that share no host."""
    players: list[int | None] = list(range(hosts))
    if hosts % 2:
        players.append(None)  # who meets it pauses
    found = []
    for _ in range(len(players) - 1):
        opposite = reversed(players)
        half = zip(players[: len(players) // 2], opposite, strict=False)
        found.append([(min(a, b), max(a, b)) for a, b in half if a is not None and b is not None])
        players.insert(1, players.pop())
    return found


def own_links(host: int, hosts: int) -> Iterator[Pair]:
    """The links (from, to) that a host takes part in, in order; both directions of a pair."""
    for pairs in rounds(hosts):
        for a, b in pairs:
            if host in (a, b):
                yield a, b
                yield b, a


class Progress:
    """Says how many of a host's links are measured, at most every few seconds."""

    def __init__(self, total: int, report: Callable[[str], None]) -> None:
        self._total, self._report, self._done = total, report, 0
        self._begin_s = self._said_s = time.monotonic()

    def advance(self, what: str) -> None:
        self._done += 1
        now_s = time.monotonic()
        if now_s - self._said_s < _PAUSE_S or self._done == self._total:
            return
        self._said_s = now_s
        left_s = (now_s - self._begin_s) / self._done * (self._total - self._done)
        self._report(
            f"measured {self._done} of this host's {self._total} links, the last {what}; "
            f"{format_duration(left_s)} left"
        )
