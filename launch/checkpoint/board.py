"""Small messages between all ranks from a thread of its own, beside training: in the run's store.

A rank's links and control messages belong to its main thread; whoever works beside it uses this.
"""

import contextlib
import json
import time
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

_POLL_S = 0.02
_SLOW_POLL_S = 0.2
_SOON_S = 2.0


class Board:
    """Gathers JSON values of all ranks, which all make the same calls in the same order."""

    def __init__(self, store: Store, rank: int, world: int, *, name: str, limit_s: float) -> None:
        """`limit_s` is how long ranks wait for the slowest."""
        self._store, self._rank, self._world = PrefixStore(name, store), rank, world
        self._limit_s, self._number = limit_s, 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order.

        Raises:
            TimeoutError: a rank did not come in time; it is named.
            RuntimeError: the store is gone.
        """
        number, self._number = self._number, self._number + 1
        self._store.set(f"{number}/{self._rank}", json.dumps(value))
        keys = [f"{number}/{rank}" for rank in range(self._world)]
        self._wait(keys)
        found = [json.loads(self._store.get(key)) for key in keys]
        if number:  # all have come here, so all have read what was there before
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"{number - 1}/{self._rank}")
        return found

    def _wait(self, keys: list[str]) -> None:
        """Ask now and then: a wait inside the store would keep other threads from it."""
        start_s = time.monotonic()
        while not self._store.check(keys):
            waited_s = time.monotonic() - start_s
            if waited_s > self._limit_s:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise TimeoutError(
                    f"rank {', '.join(map(str, absent))} did not answer for {self._limit_s:.0f} s"
                )
            time.sleep(_POLL_S if waited_s < _SOON_S else _SLOW_POLL_S)
