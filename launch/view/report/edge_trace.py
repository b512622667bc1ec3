"""Traffic of this host's connections, second by second, for display and report."""

import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypedDict

_PERIOD_S = 1.0  # of the rates that are shown as those of now
_MOST_READINGS = 240  # in four minutes; then every other one goes, again and again

Status = Mapping[str, Any]
"""The relay's view: this host's name, and counts so far of the link to each other."""
_Reading = tuple[float, Mapping[str, Any]]  # (time, links)


class EdgeSample(TypedDict):
    """One direction between two hosts over `seconds`, until `end_s` after the trace began.

    `retransmitted` and `resumed` count what happened meanwhile; `silence_s` is for how long nothing
    had been heard from the target at the end.
    """

    target: str
    end_s: float
    seconds: float
    sent_Bps: float
    received_Bps: float
    round_trip_s: float
    retransmitted: int
    resumed: int
    silence_s: float


class EdgeNow(NamedTuple):
    """A connection as this host sees it: rates of the last second, and bytes so far."""

    target: str
    sent_Bps: float
    received_Bps: float
    sent_nbytes: int
    received_nbytes: int
    round_trip_s: float
    silence_s: float


class EdgeTrace:
    """Asks the relay every second, in a thread; a context manager around training.

    `read` returns what the relay knows (`overlay.ranks.relay_status`), or None if there is
    none: then this does nothing.
    """

    def __init__(self, read: Callable[[], Status | None], most: int = _MOST_READINGS) -> None:
        """Keeps at most so many readings, an even number."""
        self.host = ""
        """The name of this host, if there is a relay."""
        self._read, self._most = read, most
        self._readings: list[_Reading] = []
        self._now: list[_Reading] = []  # the last two
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        first = self._read()
        if first is not None:
            self.add(first)
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * _PERIOD_S)

    @property
    def samples(self) -> list[EdgeSample]:
        """All so far; in a long run each covers several seconds."""
        readings = list(self._readings)
        return [s for two in pairwise(readings) for s in _samples(*two, start_s=readings[0][0])]

    def edges(self) -> list[EdgeNow]:
        """This host's connections now to hosts of the run, with bytes since the trace began."""
        first, last = self._readings[:1], self._now
        if len(last) < 2:
            return []

        links = last[1][1]
        gone = {name for name, link in links.items() if link.get("left") or link.get("lost")}

        def nbytes(target: str, count: str) -> int:
            return int(links[target][count] - first[0][1].get(target, {}).get(count, 0))

        return [
            EdgeNow(
                sample["target"],
                sample["sent_Bps"],
                sample["received_Bps"],
                nbytes(sample["target"], "sent_nbytes"),
                nbytes(sample["target"], "received_nbytes"),
                sample["round_trip_s"],
                sample["silence_s"],
            )
            for sample in _samples(last[0], last[1], 0.0)
            if sample["target"] not in gone
        ]

    def add(self, status: Status, now_s: float | None = None) -> None:
        reading = (time.monotonic() if now_s is None else now_s, status["links"])
        self.host = status["name"]
        self._now = [*self._now[-1:], reading]
        readings = [*self._readings, reading]
        # counts go on, so nothing is lost with every other one; the first and the last stay
        self._readings = readings[::2] if len(readings) > self._most else readings

    def _run(self) -> None:
        while not self._over.wait(_PERIOD_S):
            try:
                status = self._read()
            except RuntimeError:  # the relay is gone, and the run ends
                return
            if status is not None:  # else it is late
                self.add(status)


def _samples(first: _Reading, then: _Reading, start_s: float) -> list[EdgeSample]:
    """Changes between two readings, on connections that were there before."""
    (before_s, before), (after_s, after) = first, then

    def more(target: str, count: str) -> Any:
        return after[target][count] - before[target][count]

    return [
        EdgeSample(
            target=target,
            end_s=after_s - start_s,
            seconds=after_s - before_s,
            sent_Bps=more(target, "sent_nbytes") / (after_s - before_s),
            received_Bps=more(target, "received_nbytes") / (after_s - before_s),
            round_trip_s=link["round_trip_s"],
            retransmitted=more(target, "retransmitted"),
            resumed=more(target, "resumed"),
            silence_s=link["silence_s"],
        )
        for target, link in after.items()
        if target in before
    ]
