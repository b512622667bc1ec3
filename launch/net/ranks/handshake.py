"""Before step 0 all ranks agree on config, data, versions and a run id, in the run's store."""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.host.interfaces import format_endpoint, resolve, serve
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.store import connect_store, hold_store
from thinpipe.pipeline.comm.transport import Transport

_READ_WAIT_S = 60.0
"""How long ranks may take to read what others sent: a busy machine may stall one."""
_POLL_S = 0.02  # each look is a request to the store, which all ranks share
_SAY_S, _SAY_LATE_S = 2.0, 30.0
"""When ranks say for whom they wait: alone, and where their agents have met before."""
_GONE = (
    "the rendezvous store is gone: the process or machine that holds it has ended; see its own "
    "output for the reason"
)


class HandshakeError(RuntimeError):
    """Ranks were started with different settings, or one did not join."""


def store_address() -> tuple[str, int]:
    """Where the ranks' environment says that the store is."""
    return _variable("MASTER_ADDR"), int(_variable("MASTER_PORT"))


class Lobby:
    """For whom a rank waits at the start: said soon, and whenever that changes.

    Ranks of agents, which have met before, come within a moment, or on a busy machine a few more.
    """

    def __init__(
        self, world: int, wait_s: float, say: Callable[[str], None], problem: str | None = None
    ) -> None:
        """`problem` is what keeps this rank from starting, as the others will be told."""
        self._world, self._say, self._problem = world, say, problem
        self._limit_s = time.monotonic() + wait_s
        self._next_s = time.monotonic() + (_SAY_LATE_S if agents_met() else _SAY_S)
        self._said: list[int] = []

    def look(self, missing: Collection[int]) -> None:
        """These ranks have not come."""
        now_s = time.monotonic()
        if missing and now_s > self._next_s and [*missing] != self._said:
            self._said, self._next_s = [*missing], now_s + _SAY_S
            why = f"{self._problem}; waiting to tell" if self._problem else "waiting for"
            where = f"{_ranks(missing)} of {self._world} (WORLD_SIZE) at {_address()}"
            left_s = self._limit_s - now_s
            self._say(f"{why} {where}, {left_s:.0f} s left (pipeline.peer_timeout_s)")

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Rank 0 is waited for inside a call."""
        late_s = max(0.0, self._next_s - time.monotonic())
        timer = threading.Timer(late_s, lambda: self.look([0]))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def absent(self, ranks: Collection[int], wait_s: float) -> HandshakeError:
        """They did not come; nor would it have helped, if this rank has a problem."""
        words = _absent(ranks, wait_s)
        return HandshakeError(f"{self._problem}; {words}" if self._problem else words)


def agents_met() -> bool:
    """Whether the ranks were started by torch's agents, which keep the run's store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def open_store(rank: int, *, wait_s: float, server: socket.socket | None = None) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, which rank 0 holds unless torchrun's agents do.

    `server` listens there already, if given.

    Raises:
        HandshakeError: nobody answers there, or rank 0 cannot hold it there.
        ValueError: MASTER_ADDR or MASTER_PORT is not set.
    """
    host, port = store_address()
    if rank != 0 or agents_met():
        try:
            return connect_store((host, port), wait_s=wait_s)
        except RuntimeError:
            raise HandshakeError(_absent([0], wait_s)) from None
    try:
        return hold_store(server or serve((resolve(host), port)), wait_s=wait_s)
    except OSError as error:
        raise HandshakeError(
            f"rank 0 cannot listen at {_address()}: {error.strerror}; give all ranks a MASTER_ADDR "
            "of its machine and a MASTER_PORT that nothing uses there"
        ) from None


def fresh_name(store: Store, rank: int, world: int, lobby: Lobby, *, wait_s: float) -> str:
    """The name of a part of the store in which nothing was written before all these ranks came.

    torchrun's agents keep one store over restarts, in which the addresses of ranks that are gone
    would be found. So rank 0 draws a name, and sends it to each rank that presents a fresh random
    number.

    Raises:
        HandshakeError: ranks did not join; the error of those that did names them.
    """
    store = PrefixStore("lobby", store)
    if rank == 0:
        name, absent = _receive(store, world, lobby, wait_s)
    else:
        number = secrets.token_hex(8)
        store.set(f"hello/{rank}", number)
        name = _polled(store, f"welcome/{rank}/{number}", wait_s, lambda: lobby.look([0]))
        store.set(f"here/{rank}/{name}", "")

        def look() -> None:
            others = (other for other in range(1, world) if other != rank)
            lobby.look([other for other in others if not store.check([f"hello/{other}"])])

        absent = json.loads(_polled(store, f"absent/{name}", wait_s + _READ_WAIT_S, look))
        store.set(f"read/{rank}/{name}", "")
    if absent:
        raise lobby.absent(absent, wait_s)
    return name


def _receive(store: Store, world: int, lobby: Lobby, wait_s: float) -> tuple[str, list[int]]:
    """Rank 0's part: the name it drew, and the ranks that did not join, as sent to all others."""
    name, answered = secrets.token_hex(8), dict.fromkeys(range(1, world), "")
    limit_s = time.monotonic() + wait_s
    while answered and time.monotonic() < limit_s:
        for other, last in list(answered.items()):
            if store.check([f"here/{other}/{name}"]):
                del answered[other]
            elif store.check([f"hello/{other}"]):
                number = store.get(f"hello/{other}").decode()
                if number != last:
                    store.set(f"welcome/{other}/{number}", name)
                    answered[other] = number
        lobby.look(answered)
        time.sleep(_POLL_S)
    store.set(f"absent/{name}", json.dumps(list(answered)))
    if answered:
        came = set(range(1, world)) - answered.keys()
        _let_read(store, [f"read/{other}/{name}" for other in came])
    return name, list(answered)


def agree(
    store: Store,
    rank: int,
    world: int,
    facts: Mapping[str, Any],
    *,
    problem: str | None,
    wait_s: float,
) -> int:
    """Compare every rank's `facts` (JSON-able, nested) with rank 0's; return the run id.

    `problem` is what keeps this rank from starting, if anything does.

    Raises:
        HandshakeError: a rank has a problem, differs (its values and rank 0's are named), or did
            not come.
    """
    store = PrefixStore("handshake", store)
    if rank == 0:
        store.set("run_id", secrets.token_hex(8))
    store.set(f"facts/{rank}", json.dumps([problem, facts], sort_keys=True, default=str))
    everyone = [json.loads(_get(store, f"facts/{r}", r, wait_s)) for r in range(world)]
    store.set(f"read/{rank}", "")
    if problems := _problems(everyone):
        if rank == 0:
            _let_read(store, [f"read/{r}" for r in range(world)])
        raise HandshakeError(problems)
    return int(_get(store, "run_id", 0, wait_s), 16)


def agree_with(run: Store, facts: Mapping[str, Any]) -> int:
    """As `agree`, with rank 0 of a run that is under way, whose store this is."""
    store = PrefixStore("handshake", run)
    _, theirs = json.loads(store.get("facts/0"))
    mine = json.loads(json.dumps(facts, default=str))
    if found := differences(mine, theirs):
        words = "; ".join(
            f"{name.removeprefix('config.')} = {own}, the run has {its}" for name, own, its in found
        )
        raise HandshakeError(
            f"--join: this machine has {words}; use the run's own file, settings and data"
        )
    return int(store.get("run_id"), 16)


def agree_now(transport: Transport, facts: Mapping[str, Any], problem: str | None) -> None:
    """Compare what became known after the start; HandshakeError as from `agree`."""
    own = json.loads(json.dumps([problem, facts], default=str))
    if problems := _problems(gather_json(transport, own)):
        raise HandshakeError(problems)


def _problems(everyone: Sequence[tuple[str | None, Mapping[str, Any]]]) -> str:
    own = {text: f"rank {r}" for r, (text, _) in reversed(list(enumerate(everyone))) if text}
    if own:
        return "; ".join(f"{who}: {text}" for text, who in own.items())
    different = [
        f"rank {other} has {name.removeprefix('config.')} = {theirs}, rank 0 has {ours}"
        for other, (_, theirs_all) in enumerate(everyone)
        for name, theirs, ours in differences(theirs_all, everyone[0][1])
    ]
    if len(different) > 8:
        different[8:] = [f"and {len(different) - 8} more"]
    head = "ranks were started with different settings: "
    return head + "; ".join(different) if different else ""


def _let_read(store: Store, keys: list[str]) -> None:
    """Wait until all others have read: the store may end with this process."""
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=_READ_WAIT_S))


def _polled(store: Store, key: str, wait_s: float, look: Callable[[], None]) -> str:
    limit_s = time.monotonic() + wait_s
    try:
        while not store.check([key]):
            if time.monotonic() > limit_s:
                raise HandshakeError(_absent([0], wait_s))
            look()
            time.sleep(_POLL_S)
        return store.get(key).decode()
    except RuntimeError as error:
        if isinstance(error, HandshakeError):
            raise
        raise HandshakeError(_GONE) from None


def _get(store: Store, key: str, rank: int, wait_s: float) -> str:
    try:
        store.wait([key], timedelta(seconds=wait_s))
        return str(store.get(key).decode())
    except RuntimeError as error:  # torch's DistStoreError
        late = "timeout" in str(error).lower()
        raise HandshakeError(_absent([rank], wait_s) if late else _GONE) from None


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _absent(ranks: Collection[int], wait_s: float) -> str:
    are, they = ("are they", "they") if len(ranks) > 1 else ("is it", "it")
    return (
        f"{_ranks(ranks)} did not join within {wait_s:.0f} s; {are} started, and can {they} reach "
        f"{_address()}? (run `thinpipe doctor` on each machine)"
    )


def _address() -> str:
    host, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return format_endpoint(host, int(port)) if host and port else "the rendezvous host"


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(
            f"{name} is not set, and a rank needs it; start ranks with torchrun, or unset RANK"
        )
    return value


def differences(theirs: Any, ours: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, their value, our value) of every leaf in which two nested dicts differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found: list[tuple[str, Any, Any]] = []
        for key in sorted(theirs.keys() | ours.keys()):
            place = f"{name}.{key}" if name else key
            found += differences(theirs.get(key), ours.get(key), place)
        return found
    return [] if theirs == ours else [(name, theirs, ours)]
