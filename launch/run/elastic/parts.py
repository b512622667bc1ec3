"""Several machines bring a replica to a run under way: each has some of its ranks.

Each says in the run's store how many it has, and shows that it still waits. Rank 0 of the run puts
the first of them together that have as many ranks as a replica.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.ranks.group import PARTS

_LOOK_S, _SILENT_S = 0.5, 5.0  # machines that wait show it ten times a second


def bring_together(run: Store, whole: int) -> None:
    """Have machines come together, as long as there is a run; for a thread of its rank 0.

    `run` is that thread's own connection.
    """
    store, waiting, seen = PrefixStore(PARTS, run), dict[str, _Part](), set[int]()
    with suppress(RuntimeError):  # the store is gone, which ends the process
        while True:
            for number in sorted({*range(1, store.add("count", 0) + 1)} - seen):
                if store.check([f"came/{number}"]):
                    seen.add(number)
                    said = _said(store.get(f"came/{number}"), whole)
                    waiting |= {part.name: part for part in said}
            chosen = _whole([part for part in waiting.values() if part.waits(store)], whole)
            place = 0
            for part in chosen:
                store.set(f"place/{part.name}", json.dumps([f"whole-{chosen[0].name}", place]))
                place += part.ranks
                del waiting[part.name]
            time.sleep(_LOOK_S)


class _Part:
    def __init__(self, name: str, ranks: int) -> None:
        self.name, self.ranks = name, ranks
        self._count, self._since_s = 0, time.monotonic()

    def waits(self, store: Store) -> bool:
        """Whether this machine has shown lately that it still waits."""
        count, now_s = store.add(f"waits/{self.name}", 0), time.monotonic()  # get would wait for it
        if count != self._count:
            self._count, self._since_s = count, now_s
        return now_s < self._since_s + _SILENT_S


def _said(text: bytes, whole: int) -> list[_Part]:
    """The machine that said this; none, if it is no name and number of ranks."""
    try:
        name, ranks = json.loads(text)
    except (ValueError, TypeError):
        return []
    fits = isinstance(name, str) and type(ranks) is int and 0 < ranks < whole
    return [_Part(name, ranks)] if fits else []


def _whole(parts: Sequence[_Part], whole: int) -> Sequence[_Part]:
    """The first of them that are a whole replica; none if they are not."""
    for count in range(2, whole + 1):
        for chosen in combinations(parts, count):
            if sum(part.ranks for part in chosen) == whole:
                return chosen
    return ()
