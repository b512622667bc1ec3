"""Processes that stand still, though their machines answer: stopped, frozen or suspended."""

import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

_BEAT_S = 1.0


class Beats:
    """A process of a run counts in the run's store; the first looks at the counts of the others."""

    def __init__(self, store: Store, member: int, patience_s: float) -> None:
        """`store` is the calling thread's own."""
        self._store, self._member = PrefixStore("beats", store), member
        self.patience_s = patience_s
        self._next_s = 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # the count, and when it had changed

    def silent(self, members: Sequence[int]) -> list[int]:
        """Those of these members that have stood still for `patience_s`. Called more than once a
        second.

        Members that never counted are still starting.

        Raises:
            RuntimeError: the store is gone.
        """
        if time.monotonic() < self._next_s:
            return []
        self._store.add(str(self._member), 1)
        counts = {m: self._store.add(str(m), 0) for m in members} if self._judges(members) else {}
        now_s = time.monotonic()
        self._next_s = now_s + _BEAT_S
        for member, count in counts.items():
            if count != self._seen.get(member, (0, 0.0))[0]:
                self._seen[member] = count, now_s
        since_s = {member: self._seen[member][1] for member in counts if member in self._seen}
        return [member for member, then_s in since_s.items() if now_s - then_s > self.patience_s]

    def _judges(self, members: Sequence[int]) -> bool:
        return self._member == min(members)
