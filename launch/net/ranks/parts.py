"""Several machines bring a replica to a run under way: each has some of its ranks.

Each says in the run's store how many it has, and shows that it still waits. Rank 0 of the run puts
the first of them together that have as many ranks as a replica.
"""

import json
import time
from collections.abc import Iterable
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.ranks.handshake import HandshakeError

_POLL_S, _LOOK_S, _SILENT_S = 0.1, 0.5, 5.0


def come_together(
    run: Store, own: str, ranks: int, whole: int, *, first: bool, wait_s: float
) -> tuple[str, int]:
    """The name of the replica that this machine's `ranks` are part of, and where they begin in it.

    All its ranks call it, with the name that the machine has in the `run`'s store; the `first`
    speaks for it. Waits for others until they are a `whole` replica.

    Raises:
        HandshakeError: they did not come in time.
    """
    store, limit_s = PrefixStore("parts", run), time.monotonic() + wait_s
    if first:
        store.set(f"came/{store.add('count', 1)}", json.dumps([own, ranks]))
    while not store.check([f"place/{own}"]):
        if time.monotonic() > limit_s:
            raise HandshakeError(
                f"--join, --ranks = {ranks}: a replica has {whole} ranks, and no machines with the "
                f"others came within {wait_s:.0f} s (pipeline.peer_timeout_s); start them, or join "
                "with all ranks"
            )
        if first:
            store.add(f"waits/{own}", 1)
        time.sleep(_POLL_S)
    name, place = json.loads(store.get(f"place/{own}"))
    return name, place


def bring_together(run: Store, whole: int) -> None:
    """Have machines come together, as long as there is a run; for a thread of its rank 0.

    `run` is that thread's own connection.
    """
    store, waiting, handled = PrefixStore("parts", run), dict[str, _Part](), 0
    with suppress(RuntimeError):  # the store is gone, which ends the process
        while True:
            for number in range(handled + 1, store.add("count", 0) + 1):
                own, ranks = json.loads(store.get(f"came/{number}"))
                waiting[own] = _Part(own, ranks)
                handled = number
            there = [part for part in waiting.values() if part.waits(store)]
            chosen, place = _whole(there, whole), 0
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
        count, now_s = store.add(f"waits/{self.name}", 0), time.monotonic()
        if count != self._count:
            self._count, self._since_s = count, now_s
        return now_s < self._since_s + _SILENT_S


def _whole(parts: Iterable[_Part], whole: int) -> list[_Part]:
    """The first of them that are a whole replica; none if they are not."""
    chosen: list[_Part] = []
    for part in parts:
        if sum(one.ranks for one in chosen) + part.ranks <= whole:
            chosen.append(part)
    return chosen if sum(one.ranks for one in chosen) == whole else []
