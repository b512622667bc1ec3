"""A rank that joins a run which is under way: its replica meets alone, then enters the run."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.ranks.handshake import HandshakeError
from thinpipe.pipeline.mesh import Mesh

JOINS = "THINPIPE_JOINS"
"""Environment variable of a newcomer: what its replica calls itself in the run's store."""
_NAME, _POLL_S = "run", 0.1
_OPEN, _CUTS = "elastic/door/first", "elastic/cuts"


def joins() -> bool:
    """Whether this rank is a newcomer."""
    return JOINS in os.environ


def name_run(met: Store, name: str) -> None:
    """Said by rank 0: the run is in this part of the store."""
    met.set(_NAME, name)


def find_run(met: Store, wait_s: float) -> str:
    """The part of the store that is the run's, once newcomers may come.

    Raises:
        HandshakeError: there is none.
    """
    limit_s = time.monotonic() + wait_s
    while time.monotonic() < limit_s:
        if met.check([_NAME]):
            name = met.get(_NAME).decode()
            if PrefixStore(name, met).check([_OPEN]):
                return name
        time.sleep(_POLL_S)
    raise HandshakeError(
        f"--join: nobody may join the run there yet, after {wait_s:.0f} s: it has not begun, or "
        "goes on without no replica ([elastic] min_replicas)"
    )


def tell_cuts(store: Store, cuts: tuple[int, ...]) -> None:
    """Said by rank 0, for newcomers that would have to measure where they are."""
    store.set(_CUTS, json.dumps(cuts))


@dataclass
class Newcomer:
    """What it has of the run."""

    store: Store
    """The run's."""
    own: Store
    """That of the ranks of its replica."""
    say: Callable[[int], None]
    """Tells its supervisor which rank of the run it is."""
    take_part: Callable[[], None]
    """From here on it fails with the run, and the run with it."""
    has_entered: bool = False

    @property
    def cuts(self) -> list[int]:
        found: list[int] = json.loads(self.store.get(_CUTS))
        return found

    def numbers(self, draw: Callable[[int], list[int]], mesh: Mesh) -> list[int]:
        """Those of its replica's ranks in the run; one of them draws."""
        if mesh.rank == 0:
            self.own.set("numbers", json.dumps(draw(mesh.world_size)))
        found: list[int] = json.loads(self.own.get("numbers"))
        return found

    def enter(self) -> None:
        """It is let in."""
        self.take_part()
        self.has_entered = True
