"""The machines of a run's members, how they are reached, and those that are lost."""

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.ranks import HostWatch, own_number, reach
from thinpipe.launch.net.ranks.failures import Losses
from thinpipe.launch.net.ranks.gloo_backend import JOINING, PORTS
from thinpipe.launch.net.ranks.network import HOLDS, first_here
from thinpipe.launch.run.elastic.beats import Beats

_LOOK_S = 0.25  # at this machine's relay, over a Unix socket; beats come less often by themselves


def say_where(store: Store, member: int, own: str) -> None:
    """Say that this `member` is on the machine `own`, and how it is reached."""
    first = first_here(member, int(os.environ.get("LOCAL_RANK", "0")))
    holds = os.environ.get(HOLDS) != "0"
    said = [own, holds, own_number(), PORTS, first]
    PrefixStore("hosts", store).set(str(member), json.dumps(said))


class Hosts:
    """The machine of each member, and what becomes of them.

    A machine that is lost cannot say so; its supervisors are lost with it. The others see that its
    relay is silent for `network.patience_s`, or was ended. If two have lost each other and both
    still reach the store, only the one of higher members is lost. Processes that stand still are
    lost too (`beats.py`).
    """

    def __init__(self, store: Store, member: int, own: str) -> None:
        """Say where this `member` is: on the machine `own`."""
        say_where(store, member, own)
        self._store, self._member, self.own = PrefixStore("hosts", store), member, own
        self.ports: set[int] = set()
        """At which members listen, now or before, but for what is sent ahead to newcomers."""
        self._names: dict[int, str] = {}
        self._firsts: dict[int, int] = {}
        self._unreached: dict[int, tuple[str, int | None, dict[Any, int]]] = {}
        self._holder = ""
        self._watch: HostWatch | None = None
        self._lock = threading.Lock()

    def now(self, members: Sequence[int]) -> None:
        """These are the members; those that are new can be reached from here on.

        Raises:
            RuntimeError: one did not say where it is in time.
        """
        said = {m: json.loads(self._store.get(str(m))) for m in members if m not in self._names}
        self._firsts |= {member: first for member, (*_, first) in said.items()}
        for name, holds, _, ports, _ in said.values():
            self.ports |= {port for traffic, port in ports.items() if traffic != JOINING}
            self._holder = name if holds else self._holder
        with self._lock:
            if self._watch is not None:
                self._watch.renew({name for name, *_ in said.values()})
            # made anew, not changed: a thread reads it (`_look`)
            names = self._names | {member: name for member, (name, *_) in said.items()}
            self._names = {member: names[member] for member in members}
        # last: who cannot be reached has a name, by which it is lost
        self._unreached |= {m: (n, number, ports) for m, (n, _, number, ports, _) in said.items()}
        for member in self._unreached.keys() & {*members}:
            self._reach(*self._unreached[member])
            del self._unreached[member]

    def reach(self, member: int) -> None:
        """Have a rank reached from here that is no member yet, or of which this is none.

        Raises:
            RuntimeError: it did not say where it is in time, or this machine's relay is gone.
        """
        name, _, number, ports, _ = json.loads(self._store.get(str(member)))
        self._reach(name, number, ports)

    def _reach(self, name: str, number: int | None, ports: dict[Any, int]) -> None:
        if name != self.own and number is not None:
            reach(number, ports)

    def of(self, member: int) -> str:
        return self._names[member]

    def machines(self, members: Sequence[int]) -> list[int]:
        """For each of these members, the place of the first that was started with it."""
        firsts = [self._firsts[member] for member in members]
        return [firsts.index(first) for first in firsts]

    def ranks_of(self, host: str) -> list[int]:
        return [member for member, name in self._names.items() if name == host]

    def of_all(self, members: Sequence[int]) -> set[str]:
        """The machines of which all members are among these."""
        return {self.of(member) for member in members} - {
            name for member, name in self._names.items() if member not in members
        }

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
        theirs, own = self.ranks_of(host), self.own_ranks
        if not theirs or not own or host == self._holder:
            return False
        return self.own == self._holder or min(theirs) > min(own)

    def watch(self, store: Store, patience_s: float) -> None:
        """Report, in a thread, members that stand still or whose machines are gone.

        The run's `store` is that thread's own.
        """
        self._watch, beats = HostWatch(), Beats(store, self._member, patience_s)
        arguments = (Losses(store), beats, self._watch)
        threading.Thread(target=self._look, args=arguments, daemon=True).start()

    def _look(self, losses: Losses, beats: Beats, watch: HostWatch) -> None:
        with suppress(RuntimeError):  # the store is gone, which ends the process
            while losses.is_open and not losses.has(self._member):
                names = self._names
                for member in beats.silent([*names]):
                    who = f"rank {member} on {names[member]}"
                    silence = f"no sign of life for {beats.patience_s:g} s (network.patience_s)"
                    losses.report(member, f"{who}: {silence}")
                # the relay may be late, or gone: then so is the store
                with self._lock, suppress(OverlayError):
                    self.report(watch.gone(), losses)
                time.sleep(_LOOK_S)

    def report(self, gone: list[str], losses: Losses) -> None:
        """Say of members on machines that are gone that they are lost, if that is for this one."""
        for host in filter(self.may_report, gone):
            for member in self.ranks_of(host):
                losses.report(member, f"rank {member} on {host}: its machine is gone")
