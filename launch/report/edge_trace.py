"""What this host's connections to others do, second by second: for the display and the report."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypedDict

_PERIOD_S = 1.0
_MOST_SAMPLES = 240


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
    """A connection as one of its hosts sees it: rates of the last second, and counts so far."""

    target: str
    sent_Bps: float
    received_Bps: float
    sent_nbytes: int
    received_nbytes: int
    round_trip_s: float
    retransmitted: int
    resumed: int
    silence_s: float


class EdgeTrace:
    """Asks the carrier every second, in a thread; a context manager around training.

    `read` returns what the carrier knows (`overlay.ranks.carrier_status`), or None if there is
    none: then this does nothing.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any] | None]) -> None:
        self.now: list[EdgeSample] = []
        """The last second, by target."""
        self.host = ""
        """The name of this host, known once there is such a second."""
        self._read, self._periods = read, list[list[EdgeSample]]()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        first = self._read()
        if first is not None:
            self._thread = threading.Thread(target=self._run, args=(first,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * _PERIOD_S)

    @property
    def is_running(self) -> bool:
        """Whether it still asks: there is a carrier, and it is not gone."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def samples(self) -> list[EdgeSample]:
        """All so far; in a long run neighbours are merged, and each covers several seconds."""
        return [sample for period in self._periods for sample in period]

    def edges(self) -> list[EdgeNow]:
        """This host's connections now."""
        past = self.samples
        return [
            _edge(last, [s for s in past if s["target"] == last["target"]]) for last in self.now
        ]

    def _run(self, before: Mapping[str, Any]) -> None:
        start_s = before_s = time.monotonic()
        while not self._over.wait(_PERIOD_S):
            try:
                after = self._read()
            except RuntimeError:  # the carrier is gone, and the run ends
                return
            assert after is not None
            now_s, self.host = time.monotonic(), after["name"]
            self.now = [
                _difference(name, before["links"][name], link, now_s - before_s, now_s - start_s)
                for name, link in after["links"].items()
                if name in before["links"]
            ]
            self._periods.append(self.now)
            before, before_s = after, now_s
            if len(self._periods) >= _MOST_SAMPLES:
                self._periods = [
                    [_merged(a, b) for a, b in zip(*two, strict=True)]
                    for two in zip(self._periods[::2], self._periods[1::2], strict=True)
                ]


def _edge(last: EdgeSample, past: Sequence[EdgeSample]) -> EdgeNow:
    return EdgeNow(
        target=last["target"],
        sent_Bps=last["sent_Bps"],
        received_Bps=last["received_Bps"],
        sent_nbytes=round(sum(s["sent_Bps"] * s["seconds"] for s in past)),
        received_nbytes=round(sum(s["received_Bps"] * s["seconds"] for s in past)),
        round_trip_s=last["round_trip_s"],
        retransmitted=sum(s["retransmitted"] for s in past),
        resumed=sum(s["resumed"] for s in past),
        silence_s=last["silence_s"],
    )


def _difference(
    target: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    seconds: float,
    end_s: float,
) -> EdgeSample:
    return EdgeSample(
        target=target,
        end_s=end_s,
        seconds=seconds,
        sent_Bps=(after["sent_nbytes"] - before["sent_nbytes"]) / seconds,
        received_Bps=(after["received_nbytes"] - before["received_nbytes"]) / seconds,
        round_trip_s=after["round_trip_s"],
        retransmitted=after["retransmitted"] - before["retransmitted"],
        resumed=after["resumed"] - before["resumed"],
        silence_s=after["silence_s"],
    )


def _merged(first: EdgeSample, then: EdgeSample) -> EdgeSample:
    seconds = first["seconds"] + then["seconds"]

    def mean(one: float, other: float) -> float:
        return (first["seconds"] * one + then["seconds"] * other) / seconds

    return EdgeSample(
        target=then["target"],
        end_s=then["end_s"],
        seconds=seconds,
        sent_Bps=mean(first["sent_Bps"], then["sent_Bps"]),
        received_Bps=mean(first["received_Bps"], then["received_Bps"]),
        round_trip_s=max(first["round_trip_s"], then["round_trip_s"]),
        retransmitted=first["retransmitted"] + then["retransmitted"],
        resumed=first["resumed"] + then["resumed"],
        silence_s=max(first["silence_s"], then["silence_s"]),
    )
