"""Machines of a run that are lost, and one that leaves: all their ranks are lost with them."""

import json
import threading
import time

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.ranks import coordinates, gone_hosts
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
        self._rank, self._own = rank, own
        self._holders = {name for name, holds in said if holds}

    def ranks_of(self, host: str) -> list[int]:
        return [rank for rank, name in enumerate(self._names) if name == host]

    @property
    def own_ranks(self) -> list[int]:
        return self.ranks_of(self._own)

    @property
    def may_leave(self) -> bool:
        """Whether the others can go on without this machine, which not all of them can spare."""
        return self._own not in self._holders and 0 not in self.own_ranks

    def watch(self, losses: Losses) -> None:
        """Report, in a thread, ranks of machines that are gone; `losses` is that thread's own."""
        if len({*self._names}) > 1:
            threading.Thread(target=self._look, args=(losses,), daemon=True).start()

    def _look(self, losses: Losses) -> None:
        reported: set[str] = set()
        while True:
            try:
                for host in {*gone_hosts()} - reported:
                    if self._says_so(host) and losses.is_open:
                        for rank in self.ranks_of(host):
                            losses.report(rank, f"rank {rank} on {host}: its machine is gone")
                        reported.add(host)
            except OverlayError:  # the relay is late, or gone: then so is the store
                pass
            except RuntimeError:  # the store is gone, which ends the process
                return
            time.sleep(_LOOK_S)

    def _says_so(self, host: str) -> bool:
        theirs = self.ranks_of(host)
        return self._own in self._holders or (bool(theirs) and min(theirs) > min(self.own_ranks))
