"""Processes that give no sign of life though their machines answer: stopped, frozen, suspended."""

import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.ranks.group import BEATS

_BEAT_S = 1.0  # below network.patience_s, at least 3 s; a request to the store for each it watches
_SLACK = 3
"""Beats that may be late: they come over the links of the run."""


class Beats:
    """A process of a run counts in the run's store, and looks at the counts of others.

    Each member is looked at by the first of the others.
    """

    def __init__(self, store: Store, member: int, patience_s: float) -> None:
        """`store` is the calling thread's own."""
        self._store, self._member = PrefixStore(BEATS, store), member
        self.patience_s = patience_s
        self._looked_s = 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # the count, and when it had changed

    def silent(self, members: Sequence[int]) -> list[int]:
        """Those of these members that have not counted for `patience_s`.

        Called more than once a second. Members that never counted are still starting.

        Raises:
            RuntimeError: the store is gone.
        """
        begin_s = time.monotonic()
        if begin_s < self._looked_s + _BEAT_S:
            return []
        if begin_s > self._looked_s + _SLACK * _BEAT_S:  # it was this process that paused
            self._seen.clear()
        self._store.add(str(self._member), 1)
        # add(0), as get would wait for a count that is not there
        counts = {member: self._store.add(str(member), 0) for member in self._watched(members)}
        self._looked_s = now_s = time.monotonic()  # after requests, which may have waited
        self._seen = {
            member: (count, now_s if count != last else since_s)
            for member, count in counts.items()
            if count
            for last, since_s in [self._seen.get(member, (0, 0.0))]
        }
        limit_s = now_s - self.patience_s - _SLACK * _BEAT_S
        return [member for member, (_, since_s) in self._seen.items() if since_s < limit_s]

    def _watched(self, members: Sequence[int]) -> list[int]:
        first, *others = sorted(members)
        if self._member == first:
            return others
        return [first] if others and self._member == others[0] else []
