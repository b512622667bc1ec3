"""What the connections of a run's machines do, while it goes on."""

import json
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Self

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.ranks import relay_status
from thinpipe.launch.view.report.edge_trace import EdgeTrace

PERIOD_S = 5.0  # some hundred bytes for each connection go to rank 0's machine
_MOST_READINGS = 60  # of another machine: rank 0 writes all of them whenever one comes


class Connections:
    """Those of this machine over time, and on rank 0 those of the others; around training.

    One rank of each machine `speaks` for it. What its relay has counted goes to the run's store
    every few seconds: some hundred bytes for each connection. That is up to a thread with a
    connection of its own to the store, so no step waits for it.
    """

    def __init__(
        self, rank: int, apart: Callable[[], Store] | None, *, speaks: bool, relay: Any = None
    ) -> None:
        """`apart` makes another connection to the store; `relay` stands in for the real one."""
        self._relay = (relay or relay_status) if speaks else lambda: None
        self._rank, self._apart = rank, apart
        self.trace = EdgeTrace(self._in_time)
        self._others: dict[int, _Other] = {}
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.trace.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.trace.__exit__()

    @property
    def tells(self) -> bool:
        return bool(self.trace.host) and self._rank > 0

    def follow(self, ranks: Collection[int]) -> None:
        """Begin to tell rank 0, or there to ask the `ranks` that tell."""
        if self._apart is not None and (self.tells or (self._rank == 0 and ranks)):
            act = self._tell if self.tells else self._ask
            threading.Thread(target=self._repeat, args=(act, ranks), daemon=True).start()

    def own(self) -> dict[str, Any] | None:
        """This machine's so far; None without a relay, as after its end."""
        mine = self._in_time()
        return None if mine is None else {**mine, "trace": self.trace.samples}

    def all(self) -> list[dict[str, Any] | None]:
        """Those of all machines that rank 0 knows of, its own first."""
        return [self.own(), *(other.told() for _, other in sorted(self._others.items()))]

    def _repeat(self, act: Callable[[Store, Collection[int]], None], ranks: Any) -> None:
        with suppress(RuntimeError):  # the store or the relay is gone, and the run ends
            assert self._apart is not None
            store = PrefixStore("connections", self._apart())
            while not self._over.wait(PERIOD_S):
                act(store, ranks)

    def _in_time(self) -> dict[str, Any] | None:
        with suppress(OverlayError):
            return self._relay()
        return None

    def _tell(self, store: Store, _ranks: Collection[int]) -> None:
        if (status := self._in_time()) is not None:
            store.set(str(self._rank), json.dumps([time.monotonic(), status]))

    def _ask(self, store: Store, ranks: Collection[int]) -> None:
        for rank in ranks:
            if store.check([str(rank)]):
                at_s, status = json.loads(store.get(str(rank)))
                self._others.setdefault(rank, _Other()).add(at_s, status)


class _Other:
    """Another machine, as it said by its own clock, and when that came."""

    def __init__(self) -> None:
        self._trace = EdgeTrace(lambda: None, most=_MOST_READINGS)
        self._at_s, self._came_s = -1.0, 0.0
        self._status: dict[str, Any] = {}

    def add(self, at_s: float, status: dict[str, Any]) -> None:
        if at_s != self._at_s:
            self._trace.add(status, at_s)
            self._at_s, self._came_s, self._status = at_s, time.monotonic(), status

    def told(self) -> dict[str, Any]:
        age_s = time.monotonic() - self._came_s
        return {**self._status, "trace": self._trace.samples, "age_s": age_s}
