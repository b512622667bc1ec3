"""A rank that joins a run which is under way: its replica meets alone, then enters the run."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.ranks.handshake import HandshakeError
from thinpipe.launch.net.ranks.network import JOINS
from thinpipe.pipeline.mesh import Mesh

_NAME, _POLL_S = "run", 0.1
_OPEN, _BEGAN = "elastic/door/first", "elastic/began"


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


def tell_began(store: Store, cuts: Sequence[int], steps: int) -> None:
    """Said by rank 0: the cuts that were measured, and how many steps were planned at first."""
    store.set(_BEGAN, json.dumps([cuts, steps]))


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
    check: Callable[[], None] = lambda: None
    """Raises if this process was asked to stop."""
    has_entered: bool = False

    @property
    def began(self) -> tuple[list[int], int]:
        """The run's cuts, and how many steps it planned at first."""
        cuts, steps = json.loads(self.store.get(_BEGAN))
        return cuts, steps

    def numbers(self, draw: Callable[[int], list[int]], mesh: Mesh) -> list[int]:
        """Those of its replica's ranks in the run; one of them draws."""
        if mesh.rank == 0:
            self.own.set("numbers", json.dumps(draw(mesh.world_size)))
        found: list[int] = json.loads(self.own.get("numbers"))
        return found
