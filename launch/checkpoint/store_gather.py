"""Small messages between all ranks from a background thread, through the run's store.

A rank's links and control messages belong to its main thread; background threads use this.
"""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.pipeline.comm.errors import TransportError

_POLL_S = 0.02  # each look is a request to the store, which all ranks share
_SLOW_POLL_S = 0.2  # from `_SOON_S` on
_SOON_S = 2.0  # polls are frequent at first, then rare, to spare the store while disks are slow
_LOOK_S = 1.0  # between questions to the relay whether a machine is gone


class StoreGather:
    """Gathers JSON values of all ranks, which all make the same calls in the same order."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        name: str,
        limit_s: float,
        gone: Callable[[], str] = str,
    ) -> None:
        """`limit_s` is how long ranks wait for the slowest; `gone` says who will not come."""
        self._store, self._rank, self._world = PrefixStore(name, store), rank, world
        self._limit_s, self._gone, self._number = limit_s, gone, 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order.

        Raises:
            TimeoutError: a rank did not come in time; it is named.
            TransportError: a machine is gone, or the store.
        """
        try:
            return self._gather(value)
        except DistNetworkError as error:
            raise TransportError("the machine that holds the run's store is gone") from error

    def _gather(self, value: Any) -> list[Any]:
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
        look_s = start_s + _LOOK_S
        while not self._store.check(keys):
            now_s = time.monotonic()
            if now_s > look_s:
                look_s = now_s + _LOOK_S
                if gone := self._gone():
                    raise TransportError(f"{self._absent(keys)} did not answer: {gone}")
            if now_s - start_s > self._limit_s:
                raise TimeoutError(f"{self._absent(keys)} did not answer for {self._limit_s:.0f} s")
            time.sleep(_POLL_S if now_s - start_s < _SOON_S else _SLOW_POLL_S)

    def _absent(self, keys: list[str]) -> str:
        absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return f"rank {', '.join(map(str, absent))}"
