"""Machines of a run that are lost: all their ranks are lost with them."""

import json
import threading
import time

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.ranks import HostWatch, coordinates
from thinpipe.launch.net.ranks.failures import Losses

_LOOK_S = 0.25


class Hosts:
    """The machine of each rank, and what becomes of them.

    A machine that is lost cannot say so; its supervisors are lost with it. The others see that its
    relay is silent for `network.patience_s`, or was ended. If two have lost each other and both
    still reach the store, only the one of higher ranks is lost.
    """

    def __init__(self, store: Store, rank: int, world: int, own: str) -> None:
        """A collective: every rank calls it with the name of its machine."""
        store = PrefixStore("hosts", store)
        store.set(str(rank), json.dumps([own, coordinates()]))
        said = [json.loads(store.get(str(other))) for other in range(world)]
        self._names = [str(name) for name, _ in said]
        self._rank, self.own = rank, own
        self._holder = next(str(name) for name, holds in said if holds)

    def ranks_of(self, host: str) -> list[int]:
        return [rank for rank, name in enumerate(self._names) if name == host]

    @property
    def own_ranks(self) -> list[int]:
        return self.ranks_of(self.own)

    @property
    def is_needed(self) -> bool:
        """Whether the run cannot go on without this machine: it has rank 0, or the store."""
        return self.own == self._holder or 0 in self.own_ranks

    def may_report(self, host: str) -> bool:
        """Whether this machine's word counts if it has lost another one.

        Without that which has the store nobody says anything.
        """
        theirs = self.ranks_of(host)
        if not theirs or host == self._holder:
            return False
        return self.own == self._holder or min(theirs) > min(self.own_ranks)

    def watch(self, losses: Losses) -> None:
        """Report, in a thread, ranks of machines that are gone; `losses` is that thread's own."""
        if len({*self._names}) > 1:
            threading.Thread(target=self._look, args=(losses, HostWatch()), daemon=True).start()

    def _look(self, losses: Losses, watch: HostWatch) -> None:
        try:
            while losses.is_open and not losses.has(self._rank):
                try:
                    gone = watch.gone()
                except OverlayError:  # the relay is late, or gone: then so is the store
                    gone = []
                self.report(gone, losses)
                time.sleep(_LOOK_S)
        except RuntimeError:  # the store is gone, which ends the process
            return

    def report(self, gone: list[str], losses: Losses) -> None:
        """Say of ranks of machines that are gone that they are lost, if that is for this one."""
        for host in filter(self.may_report, gone):
            for rank in self.ranks_of(host):
                losses.report(rank, f"rank {rank} on {host}: its machine is gone")
