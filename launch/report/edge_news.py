"""What every host's connections do now, where the run is shown: told through the run's store."""

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.report.edge_trace import EdgeNow, EdgeTrace

_PERIOD_S = 2.0
_WAIT_S = 10.0
"""Of an answer of the store; this host's own connections are shown meanwhile."""


class EdgeNews:
    """Tells the others what this host's `trace` has, from a thread; a context manager.

    That is less than 100 bytes per connection every two seconds, which nobody waits for. Without a
    carrier, and so without a trace, nothing is told.
    """

    def __init__(self, trace: EdgeTrace, open_store: Callable[[], Store], *, reads: bool) -> None:
        """`open_store` makes a connection that is used here only; `reads`: what others tell too."""
        self._trace, self._open_store, self._reads = trace, open_store, reads
        self.heard: dict[str, tuple[float, list[EdgeNow]]] = {}
        """What other hosts told last, and when that was new here (monotonic)."""
        self._raw: dict[str, bytes] = {}
        self._number = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        if self._trace.is_running:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(_PERIOD_S)  # the store may be far, or gone: then not for longer

    def _run(self) -> None:
        try:
            store = PrefixStore("edges", self._open_store())
            store.set_timeout(timedelta(seconds=_WAIT_S))
            while not self._over.wait(_PERIOD_S):
                self._exchange(store)
        except RuntimeError:  # the store is gone, and the run ends
            return

    def _exchange(self, store: Store) -> None:
        own = self._trace.edges()
        if not own:
            return
        self._number += 1  # so that what stays the same is news too
        store.set(self._trace.host, json.dumps([self._number, *map(_rounded, own)]))
        if not self._reads:
            return
        try:
            names = [e.target for e in own if e.target in self._raw or store.check([e.target])]
            told = dict(zip(names, store.multi_get(names), strict=True)) if names else {}
        except DistStoreError:  # no answer in time
            return
        for name, raw in told.items():
            if raw != self._raw.get(name):
                _, *edges = json.loads(raw)
                self.heard[name] = (time.monotonic(), [EdgeNow(*edge) for edge in edges])
                self._raw[name] = raw


def _rounded(edge: EdgeNow) -> EdgeNow:
    """Short as JSON."""
    return edge._replace(
        sent_Bps=round(edge.sent_Bps),
        received_Bps=round(edge.received_Bps),
        round_trip_s=round(edge.round_trip_s, 4),
        silence_s=round(edge.silence_s, 1),
    )
