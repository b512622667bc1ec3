"""Joining a process group, which ends as soon as another rank is lost meanwhile."""

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from thinpipe.launch.net.ranks.gloo_backend import BACKEND
from thinpipe.pipeline.comm.errors import TransportError

_POLL_S = 0.005  # only while ranks regroup: training stands still for it
_NOTHING = "?"
"""No value of any key: what `compare_set` expects, so that it returns what there is."""


class JoiningStore(Store):
    """A store in which ranks meet: who waits there is told when nobody will come.

    Groups that are made later in the default one use its store, so this holds for them, too. A
    value costs one round trip, however torch asks for it: waits for a key, then for its value.
    """

    def __init__(self, store: Store, is_incomplete: Callable[[], bool], wait_s: float) -> None:
        """`is_incomplete` says that a rank is lost; without that a wait ends after `wait_s`."""
        super().__init__()
        self._store, self._is_incomplete, self._wait_s = store, is_incomplete, wait_s
        self._came: dict[str, bytes] = {}
        self._counted: dict[str, int] = {}

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        if key not in self._came:
            self.wait([key])
        return self._came.pop(key)

    def add(self, key: str, value: int) -> int:
        """What was counted is known: of those who add to it, the last knows that all have."""
        if value or key not in self._counted:
            self._counted[key] = self._store.add(key, value)
        return self._counted[key]

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys.

        Raises:
            TransportError: a rank is lost, or did not come in time.
        """
        wait_s = self._wait_s if timeout is None else min(self._wait_s, timeout.total_seconds())
        limit_s = time.monotonic() + wait_s
        for key in keys:
            while (value := self._store.compare_set(key, _NOTHING, "")) == _NOTHING.encode():
                self._check(limit_s, wait_s)
                time.sleep(_POLL_S)
            self._came[key] = value
        self._check(math.inf, wait_s)

    def _check(self, limit_s: float, wait_s: float) -> None:
        if self._is_incomplete():
            raise TransportError("another rank was lost meanwhile")
        if time.monotonic() > limit_s:
            raise TransportError(f"a rank did not come to the new group within {wait_s:.0f} s")


def join_anew(store: JoiningStore, rank: int, world: int, wait_s: float) -> None:
    """Leave torch's default group, if there is one, and make another; the store must be kept.

    Raises:
        TransportError: a rank is lost, or did not come in time.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0  # a try that failed counts, and names the next group
    try:
        dist.init_process_group(
            BACKEND, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=wait_s)
        )
    except RuntimeError as error:
        raise TransportError(f"rank {rank}: {str(error).splitlines()[0]}") from error
