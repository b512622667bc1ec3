"""Hosts meet in a store: torchrun's agents learn their numbers there, at the start and at restarts.

torch's own c10d rendezvous unpickles what it finds in the store; here are only numbers and JSON.
Each host posts that it has come. The one that holds the store waits for as many as the run has,
and tells each its number and the round. A host that was started again after its launcher had died
posts like the others, which have posted for the next round and wait for it.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID as _END
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import _LAST_MEMBER_CHECKIN

from thinpipe.launch.config.placement import check_hosts
from thinpipe.launch.host.terminal import end_now, print_error
from thinpipe.launch.net.overlay.process import Overlay
from thinpipe.launch.net.ranks import fork_server
from thinpipe.launch.net.ranks.network import ROUND, HostNetwork
from thinpipe.launch.net.ranks.restarts import rejected_restarts
from thinpipe.launch.net.ranks.stopping import Stop

BACKEND = "thinpipe"
"""The name that `register` gives it in torch's launcher."""
_PART = "rendezvous"  # of the store
_Come = tuple[Any, int, str]  # what sorts a host, the number of its post, and its name
_POLL_S = 0.05  # each look is a few requests to the store, which all machines share
_LEAVE_S = 5.0  # for launchers that still read there why the run ended
_SAY_FIRST_S, _SAY_EVERY_S = 2.0, 10.0
"""When hosts that wait at a restart say for whom: others come within a moment."""
_LOOK_S = 1.0  # how often a running host looks whether another one has come again


def register() -> None:
    """Register it with torch's launcher; "make" in its settings makes the host's `Rendezvous`."""
    rendezvous_handler_registry.register(BACKEND, _make)


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    # no lambda: torch takes a name a second time for the same function only
    made: RendezvousHandler = parameters.get("make")()
    return made


class _RoundStore(PrefixStore):
    """That of the agents of one round, who wait there in the end for those of all hosts.

    A host that is gone does not come; the ranks of others may have gone on without it.
    """

    def __init__(
        self, prefix: str, store: Store, own: str, hosts: Collection[str], overlay: Overlay
    ) -> None:
        super().__init__(prefix, store)
        self._own, self._hosts, self._overlay = own, hosts, overlay
        self._before = {name: link["restarts"] for name, link in overlay.links().items()}

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """As of any store; at the end, until each of the hosts has come, or is gone."""
        if keys != [f"{_END}{_LAST_MEMBER_CHECKIN}"]:
            super().wait(keys, *timeout)
            return
        self.set(f"ended/{self._own}", "")
        awaited = {*self._hosts}
        while awaited := {host for host in awaited if not self.check([f"ended/{host}"])}:
            if self._overlay.has_ended:
                return  # and with it all others are gone
            for name, link in self._overlay.links().items():
                again = link["restarts"] > self._before.get(name, 0)
                if link["left"] or link["lost"] or again:
                    awaited.discard(name)
            time.sleep(_POLL_S)


def tell_left(store: Store) -> None:
    """Say in the run's store that this launcher was stopped: where all end it does not come."""
    with contextlib.suppress(RuntimeError):
        PrefixStore(_PART, store).add("left", 1)


class _OneMachineStore(PrefixStore):
    """As `_RoundStore`, of launchers on one machine: who does not come has said that it leaves.

    One that was killed has not: it is waited for as long as torch's agents do.
    """

    def __init__(self, prefix: str, store: Store, hosts: int, left: Callable[[], int]) -> None:
        super().__init__(prefix, store)
        self._hosts, self._left = hosts, left

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        if keys != [f"{_END}{_LAST_MEMBER_CHECKIN}"]:
            super().wait(keys, *timeout)
            return
        waits: timedelta = self.timeout  # type: ignore[attr-defined]  # not in its stubs
        ended, limit_s = self.add("ended", 1), time.monotonic() + waits.total_seconds()
        while ended + self._left() < self._hosts and time.monotonic() < limit_s:
            time.sleep(_POLL_S)
            ended = self.add("ended", 0)


class RejectedError(RendezvousClosedError):
    """A rank wants no restart; the message says why."""


class Rendezvous(RendezvousHandler):
    """This host's part in it."""

    def __init__(
        self,
        network: HostNetwork,
        hosts: int,
        environment: dict[str, str],
        *,
        limit_s: float,
        opened: Callable[[Store], None],
        stop: Stop,
        restarts: int,
    ) -> None:
        """Open the store, or connect to it, and pass it to `opened`.

        A newcomer meets nobody, in a part of the store that has its name. `environment` of ranks
        gets the number of the round. `stop` learns when there are no ranks to answer signals.
        Without `restarts` nobody comes later.
        """
        self._network, self._hosts, self._limit_s = network, hosts, limit_s
        self._environment, self._stop = environment, stop
        self._restarts = restarts
        self._what = f"{hosts} machines at {network.endpoint}"
        self._limit = f"{limit_s:.0f} s (pipeline.peer_timeout_s)"
        self._come: dict[str, _Come] = {}
        self._is_open = False
        self._timer = threading.Timer(limit_s, self._time_out)
        self._timer.daemon = True
        if hosts > 1:
            if network.overlay is None:  # else it was said before
                here = "" if network.server is None else "; the run's store is here"
                print_error(f"waiting for {self._what}, at most {self._limit}{here}")
            self._timer.start()
        self._holds = network.server is not None or bool(network.newcomer)
        self._tcp = network.open_store(limit_s)
        opened(self._tcp)
        self._store = PrefixStore(f"{_PART}{network.newcomer}", self._tcp)
        self._posts = self._handled = self._round = 0
        self._names: list[str] = []  # of the round before
        self._looked_s = 0.0
        self._is_open = True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return "thinpipe"

    @property
    def use_agent_store(self) -> bool:
        """Ranks use this store too: they look for it where `next_rendezvous` says."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all hosts have come.

        Raises:
            RendezvousTimeoutError: they did not in time.
            RendezvousClosedError: another host has ended the run.
            RejectedError: a rank says that a restart would not help.
            RendezvousConnectionError: the host that holds the store is gone.
            SignalException: this host was asked to stop.
        """
        if self._round:
            self._stop.waits()
        try:
            rank, self._round, self._posts = self._meet()
        except SignalException:  # of which torch tells nobody
            self._stop.say()
            with contextlib.suppress(RuntimeError):
                self.set_closed()
            raise
        except (RendezvousTimeoutError, RendezvousClosedError):
            raise
        except RuntimeError as error:
            raise RendezvousConnectionError(str(error).splitlines()[0]) from None
        self._stop.runs()
        fork_server.revive()
        self._timer.cancel()
        self._environment[ROUND] = str(self._round)
        host, port = self._network.store
        name, overlay = f"{self._network.newcomer}round{self._round}", self._network.overlay
        store: Store = _OneMachineStore(
            name, self._tcp, self._hosts, partial(self._store.add, "left", 0)
        )
        if overlay is not None:
            store = _RoundStore(name, self._tcp, self._network.host, self._names, overlay)
        return RendezvousInfo(store, rank, self._hosts, RendezvousStoreInfo(host, port))

    def num_nodes_waiting(self) -> int:
        """Whether a host has come again; RendezvousConnectionError if all others are gone."""
        if self._network.is_gone:
            raise RendezvousConnectionError("this machine's relay has ended")
        if self._hosts == 1 or time.monotonic() - self._looked_s < _LOOK_S:
            return 0
        self._looked_s = time.monotonic()
        try:
            return int(self._store.add("posts", 0) > self._posts and self._restarts > 0)
        except RuntimeError as error:
            raise RendezvousConnectionError(str(error).splitlines()[0]) from None

    def is_closed(self) -> bool:
        return bool(self._store.check(["closed"]))

    def set_closed(self) -> None:
        self._store.set("closed", "")

    def shutdown(self) -> bool:
        """The run has ended, for all hosts.

        The one that holds the store leaves last: the others still learn there what failed.
        """
        with contextlib.suppress(RuntimeError):
            self.set_closed()
            left = self._store.add("left", 1)
            staying = self._hosts - self._network.lost_hosts() if self._holds else 0
            limit_s = time.monotonic() + _LEAVE_S
            while left < staying and time.monotonic() < limit_s:
                time.sleep(_POLL_S)
                left = self._store.add("left", 0)
        return True

    def _meet(self) -> tuple[int, int, int]:
        """This host's number, the round's, and how many posts there were then."""
        number = self._store.add("posts", 1)
        network = self._network
        entry = {"name": network.name, "order": network.order, "host": network.host}
        self._store.set(f"post/{number}", json.dumps(entry))
        limit_s, say_s = (time.monotonic() + wait_s for wait_s in (self._limit_s, _SAY_FIRST_S))
        self._come = {}
        while time.monotonic() < limit_s:
            full = self._store.check(["full"])  # set after the last "go"
            if self._store.check([f"go/{number}"]):
                rank, round_, posts, self._names = json.loads(self._store.get(f"go/{number}"))
                return rank, round_, posts
            if full:
                raise RendezvousTimeoutError(self._store.get("full").decode())
            if self._store.check(["rejected"]):
                raise RendezvousTimeoutError(self._store.get("rejected").decode())
            if self._round and (why := rejected_restarts(self._tcp)) is not None:
                raise RejectedError(why)
            if self.is_closed():
                raise RendezvousClosedError
            if network.is_gone:
                raise RendezvousConnectionError("this machine's relay has ended")
            if self._holds:
                self._receive()
            if time.monotonic() > say_s and (absent := self._absent()):
                left_s = limit_s - time.monotonic()
                print_error(f"waiting for {absent}, {left_s:.0f} s left")
                say_s = time.monotonic() + _SAY_EVERY_S
            time.sleep(_POLL_S)
        absent = self._absent() or "they"
        raise RendezvousTimeoutError(
            f"{absent} did not come within {self._limit_s:.0f} s (pipeline.peer_timeout_s)"
        )

    def _absent(self) -> str:
        posts = range(self._posts + 1, self._store.add("posts", 0) + 1)
        keys = [f"post/{number}" for number in posts]
        come = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        left = Counter(self._names)
        left.subtract({entry["name"]: entry["host"] for entry in come}.values())
        names = sorted(left.elements())
        return f"machine{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""

    def _receive(self) -> None:
        come, posts = self._come, self._store.add("posts", 0)
        while self._handled < posts and self._store.check([f"post/{self._handled + 1}"]):
            self._handled += 1
            entry = json.loads(self._store.get(f"post/{self._handled}"))
            come[entry["name"]] = (entry["order"], self._handled, entry["host"])
        if len(come) < self._hosts:
            return
        if self._network.placed:
            try:
                names = [host for *_, host in come.values()]
                check_hosts(self._network.placed, names, "the machines that joined")
            except ValueError as error:
                self._store.set("rejected", str(error))
                return
        going = sorted(come.values())[: self._hosts]
        names = [host for *_, host in going]
        for rank, (_, number, _) in enumerate(going):
            go = [rank, self._round + 1, self._handled, names]
            self._store.set(f"go/{number}", json.dumps(go))
        if not self._restarts:
            listed = ", ".join(name or "unnamed" for name in names)
            text = f"the run there has its {self._hosts} machines already ({listed})"
            self._store.set("full", f"{text}; was one of them started twice?")

    def _time_out(self) -> None:
        joined = "no run answers there (is the port in use by another program?)"
        with contextlib.suppress(RuntimeError):
            if self._is_open:
                come = {host for *_, host in self._come.values()}
                names = [host for host in dict.fromkeys(self._network.placed) if host not in come]
                missing = f"; missing: {', '.join(names)}" if self._holds and names else ""
                joined = f"only {self._store.add('posts', 0)} joined{missing}"
        failed = f"error: {self._what} did not join within {self._limit}: {joined}"
        end_now(1, f"{failed}; run `thinpipe doctor` on each")
