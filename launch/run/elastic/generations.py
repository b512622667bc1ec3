"""A run goes on without replicas that it loses, in the same processes ([elastic] min_replicas).

*Sections* are what all ranks do together: a step, an evaluation, a checkpoint. When a rank is lost,
the others abandon the section under way, agree on the next *generation* of ranks, make process
groups of it, and do that section again. No rank can be more than one section ahead of another, as
each needs messages of all. So a section counts for all or for none: who is behind takes what those
ahead have found in it. For a step that is the vector which all share before the optimizer's step,
as gradients were summed before.

Ranks learn of a loss through the run's store: from the supervisor of the process that was killed,
from others if a whole machine is gone (`hosts.py`), from a rank that leaves. A thread then breaks
this rank's connections, which wakes up whatever waits for a peer. If nobody says so, but a peer is
silent for `wait_s` or a connection is lost, all are woken up, and who does not come here in time is
lost. If all come, they connect anew, once for a section.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.terminal import end_now
from thinpipe.launch.net.ranks.failures import LOST, OUT, Losses, doubted
from thinpipe.launch.net.ranks.gloo_backend import PORTS, break_connections
from thinpipe.launch.run.elastic.hosts import Hosts
from thinpipe.launch.run.elastic.joining import JoiningStore, join_anew
from thinpipe.pipeline.comm.abandoned import abandon_if
from thinpipe.pipeline.comm.errors import SilentError, TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.wire.header import DesyncError

if TYPE_CHECKING:
    from thinpipe.launch.run.elastic.training import ElasticTraining

_NOTICE_S = 10.0
"""From a broken connection to the news of who was lost; a supervisor takes some 0.1 s."""
_POLL_S = 0.005
_WOKEN_S = 0.06
"""In which other threads see that connections are broken (`abandoned.py`)."""
_TRIES = 3
"""To connect anew where none is lost."""

_T = TypeVar("_T")


class Generations:
    """This rank's part in it, from the first step on."""

    _left_out = "the others go on without it, as its replica is lost"
    _connects_anew = True

    def __init__(  # noqa: PLR0913  # one parameter per setting
        self,
        store: Store,
        transport: GlooTransport,
        run: "ElasticTraining",
        *,
        host: str,
        least: int,
        wait_s: float,
        patience_s: float,
        members: Sequence[int] = (),
    ) -> None:
        """The run goes on with `least` replicas or more; every rank calls it, on its `host`.

        A process that stands still for `patience_s` is lost; so is a rank that is silent for
        `wait_s`, and then does not come within `patience_s`, or does not come within `wait_s` where
        a connection is lost. Ranks that come later are the
        `members` of their own transport at first.

        Raises:
            ConfigError: this rank's supervisor is not ours, so no loss would be told.
        """
        if not PORTS:
            raise ConfigError(
                f"{run.goes_on_by}: these ranks were not started by `thinpipe train`, which tells "
                "the others of a rank that is lost; start the run with it"
            )
        self._transport, self._run, self._least = transport, run, least
        self._wait_s, self._patience_s = wait_s, patience_s
        self._store, self._root = PrefixStore("elastic", store), store
        mesh = transport.mesh
        self._members = [*(members or range(mesh.world_size))]
        self._me = self._members[mesh.rank]
        self._known_as = mesh.replica, mesh.replicas  # to the run's parts
        self._generation = -1 if members else 0  # of newcomers, until they are let in
        self._done, self._packed = 0, None
        self._visits = self._tried = 0  # sections that let newcomers in: done, and begun
        self._warm = {*self._members}
        self._proven = True
        self._losses = Losses(store)
        self._lost: dict[int, str] = {}
        self._doubted: int | None = None  # the last generation in which one was silent
        self._mended: int | None = None  # the last section in which none was lost, after all
        self._changed = threading.Condition()
        self._hosts = Hosts(self._store, self._me, host)
        self._hosts.now(self._members)
        self._own = PrefixStore("elastic", store.clone())  # type: ignore[attr-defined]
        if not members:
            self._losses.open(wait_s)
        abandon_if(self._is_broken)
        own = Losses(store.clone())  # type: ignore[attr-defined]  # not in its stubs
        threading.Thread(target=self._watch, args=(own,), daemon=True).start()
        self._hosts.watch(store.clone(), patience_s)  # type: ignore[attr-defined]
        self._leaving = Losses(store.clone())  # type: ignore[attr-defined]

    def together(
        self,
        do: Callable[[], _T],
        *,
        forget: Callable[[], None] = lambda: None,
        pack: Callable[[_T], Any] = lambda result: result,
        take: Callable[[Any], _T] = lambda packed: packed,
    ) -> _T:
        """The result of a section, the same on all ranks that are left.

        `do` can be called again after `forget`. Its result becomes JSON by `pack`; a rank that is
        behind calls `take` with that of another.

        Raises:
            TransportError: a peer is lost, and the run does not go on without it.
        """
        while True:
            try:
                self.prove()
                result = do()
                packed = pack(result)
                break
            except TransportError as error:
                members = self._members
                furthest = self._regroup(error)
                behind = furthest["done"] > self._done
                if behind:
                    packed = furthest["packed"]
                    result = take(packed)
                else:
                    forget()
                self._tell(furthest, members)
                if behind:
                    break
        self._done, self._packed = self._done + 1, packed
        return result

    def prove(self) -> None:
        """Compare the replicas, if they have changed since the last time.

        Raises:
            TransportError: a peer is lost.
        """
        if not self._proven and not self._cold:
            self._run.prove_equal()
            self._proven = True

    def close(self) -> None:
        """The last section is done."""
        self._losses.close()

    def may_leave(self) -> bool:
        """Whether all ranks of this machine may leave: enough replicas are left without them.

        Of several machines that ask in a generation, one may. Called by another thread.

        Raises:
            RuntimeError: the store is gone.
        """
        size = self._transport.mesh.pipeline_ranks
        with self._changed:
            gone = {*self._hosts.own_ranks, *self._lost}
            members, generation = self._members, self._generation + self._tried
        replicas = [{*members[at : at + size]} for at in range(0, len(members), size)]
        if self._hosts.is_needed or sum(not gone & ranks for ranks in replicas) < self._least:
            return False
        first = self._own.compare_set(f"leaves/{generation}", "", self._hosts.own)
        return bool(first.decode() == self._hosts.own)

    def leave(self, why: str) -> None:
        """Have the others go on without this rank, which ends. Called by any thread.

        Raises:
            RuntimeError: the store is gone.
        """
        self._leaving.report(self._me, why)

    @property
    def hosts(self) -> Mapping[int, str]:
        """The machines of the ranks that are in the run, by their numbers."""
        return {member: self._hosts.of(member) for member in self._members}

    @property
    def number(self) -> int:
        """This rank's, which no other has or had."""
        return self._me

    @property
    def loss(self) -> str:
        """Who was lost, as long as the run goes on to the next generation."""
        return self._lost_of(self._members)

    @property
    def trouble(self) -> str:
        """Why nothing comes any more, as long as connections are broken."""
        return self.loss or ("connections are made anew" if self._is_broken() else "")

    @property
    def _cold(self) -> list[int]:
        """Members that have no state yet."""
        return [member for member in self._members if member not in self._warm]

    def _lost_of(self, members: Sequence[int]) -> str:
        return "; ".join(self._lost[member] for member in members if member in self._lost)

    def _watch(self, losses: Losses) -> None:
        """Learn of losses, and break connections so that nobody waits for one."""
        number = 1
        while True:
            try:
                rank, message = losses.wait(number)
            except RuntimeError:  # the store is gone, which ends the process
                return
            with self._changed:
                # else the next generation is there already
                is_news = rank in self._members or rank == doubted(self._generation)
                if rank >= 0:
                    self._lost[rank] = message
                elif is_news:
                    self._doubted = self._generation
                if is_news:
                    break_connections(self._hosts.ports)
                self._changed.notify_all()
            if is_news:
                self._run.interrupt()
            elif self._me == 0 and rank >= 0:  # one that is not let in yet
                losses.settle(rank, goes_on=True)
            number += 1

    def _regroup(self, error: TransportError) -> Mapping[str, Any]:
        """Form the next generation; what its rank that is furthest has posted."""
        tries = 0
        while True:
            if not self._goes_on(error) or tries == _TRIES:
                raise error
            self._run.settle()
            self._generation += 1
            members = self._agree()
            lost = [member for member in self._members if member not in members]
            goes_on = self._are_enough(members)
            out = self._hosts.of_all(lost)
            for member in lost:
                self._losses.settle(member, goes_on=goes_on, out=self._hosts.of(member) in out)
            if not goes_on:
                raise TransportError(f"{error}; {self._why_not(members)}") from error
            if self._me not in members:
                if self._cold:
                    end_now(1, f"rank {self._me}: a rank was lost as it joined; start it again")
                code = OUT if self._hosts.own in out else LOST
                end_now(code, f"rank {self._me}: {self._left_out}")
            self._be(members)
            try:
                self._form(f"generation{self._generation}")
            except TransportError as again:
                error, tries = again, tries + (not self._is_incomplete())
                continue
            found = self._furthest(self._posts(members))
            if not lost:  # all see it alike
                if found["done"] == self._mended:
                    raise error
                self._mended = found["done"]
            self._tried = max(self._tried, found["tried"])
            self._warm &= {*members}
            with self._changed:
                self._changed.notify_all()
            return found

    def _are_enough(self, members: Sequence[int]) -> bool:
        return len(members) >= self._least * self._transport.mesh.pipeline_ranks and 0 in members

    def _why_not(self, members: Sequence[int]) -> str:
        if 0 not in members:
            return "replica 0, which is lost, writes the run's folder: the others do not go on"
        left = len(members) // self._transport.mesh.pipeline_ranks
        return f"replicas left: {left}, fewer than elastic.min_replicas = {self._least}"

    def _hears(self, news: Callable[[], bool]) -> bool:
        with self._changed:
            return self._changed.wait_for(news, _NOTICE_S)

    def _goes_on(self, error: TransportError) -> bool:
        with suppress(RuntimeError):  # the store is gone, which ends the process
            self._store.set(f"here/{self._generation}/{self._me}", "")
            return self._misses_some(error) or self._blames_newcomers(error)
        return False

    def _misses_some(self, error: TransportError) -> bool:
        """Whether one is lost, or all are here and may connect anew."""
        is_silent = isinstance(error, SilentError)
        asks = is_silent or not self._hears(self._is_broken)
        if asks and not is_silent and not self._connects_anew:
            return False
        if asks and not self._is_incomplete():
            self._losses.doubt(self._generation)
        # who computes has not heard that a connection is lost
        silent = self._not_here(self._patience_s if is_silent else self._wait_s)
        if not silent and self._hears(self._is_broken) and not self._is_incomplete():
            time.sleep(_WOKEN_S)
            return self._connects_anew and not self._cold
        for member in silent if asks and not self._is_incomplete() else ():
            who = f"rank {member} on {self._hosts.of(member)}"
            self._leaving.report(member, f"{who}: does not answer")
        return self._hears(self._is_incomplete)

    def _not_here(self, wait_s: float) -> list[int]:
        """Members that do not come, within so many seconds, where they look for losses."""
        limit_s, silent = time.monotonic() + wait_s, self._members
        while silent and not self._is_incomplete() and time.monotonic() < limit_s:
            keys = {member: f"here/{self._generation}/{member}" for member in silent}
            silent = [m for m, key in keys.items() if not self._store.check([key])]
            time.sleep(_POLL_S * bool(silent))
        return silent

    def _blames_newcomers(self, error: TransportError) -> bool:
        """Whether there are some, who must not end the run: they count as lost."""
        for member in self._cold:
            self._leaving.report(member, f"rank {member} did not come in ({error})")
        return bool(self._cold) and self._hears(self._is_incomplete)

    def _is_broken(self) -> bool:
        """Whether this generation's connections are."""
        return self._is_incomplete() or self._doubted == self._generation

    def _is_incomplete(self) -> bool:
        return any(member in self._lost for member in self._members)

    def _agree(self) -> list[int]:
        """Who is in the next generation.

        The first to see all others ready, or lost, says it for all.
        """
        key = f"ready/{self._generation}"
        self._store.set(f"{key}/{self._me}", json.dumps(self._post()))
        limit_s = time.monotonic() + self._wait_s
        waiting = {*self._members}
        while waiting and time.monotonic() < limit_s:
            waiting = {m for m in waiting if not self._store.check([f"{key}/{m}"])}
            with self._changed:  # a loss counts once connections are broken
                waiting -= self._lost.keys()
            time.sleep(_POLL_S * bool(waiting))
        chosen = json.dumps(self._choose(waiting))
        said = self._store.compare_set(f"members/{self._generation}", "", chosen)
        members: list[int] = json.loads(said)
        return members

    def _post(self) -> dict[str, Any]:
        """How far this rank is, for the others."""
        return {
            "done": self._done,
            "packed": self._packed,
            "passes": self._run.passes,
            "agreed": self._run.agreed,
            "tried": self._tried,
        }

    def _posts(self, members: Sequence[int]) -> list[dict[str, Any]]:
        key = f"ready/{self._generation}"
        return [json.loads(self._store.get(f"{key}/{member}")) for member in members]

    def _choose(self, silent: Set[int]) -> list[int]:
        """The next members: replicas of which no rank is lost, or `silent` for too long."""
        size = self._transport.mesh.pipeline_ranks
        replicas = [self._members[at : at + size] for at in range(0, len(self._members), size)]
        with self._changed:
            gone = silent | self._lost.keys()
        return [member for ranks in replicas if not gone & {*ranks} for member in ranks]

    def _form(self, name: str) -> None:
        """Make the groups of the members.

        Raises:
            TransportError: another rank is lost meanwhile.
        """
        if self._is_incomplete():
            raise TransportError(f"rank {self._me}: another rank is lost")
        keys, size = PrefixStore(name, self._root), len(self._members)
        self._joining = JoiningStore(keys, self._is_incomplete, self._wait_s)
        join_anew(self._joining, self._members.index(self._me), size, self._wait_s)
        self._transport.regroup(size // self._transport.mesh.pipeline_ranks)
        with self._changed:
            if self._is_incomplete():
                break_connections(self._hosts.ports)
                raise TransportError(f"rank {self._me}: another rank was lost meanwhile")

    def _tell(self, furthest: Mapping[str, Any], before: Sequence[int]) -> None:
        """Tell the run that its members are others than before, and what the furthest has done."""
        self._proven = False
        agreed = (int(furthest["agreed"][0]), int(furthest["agreed"][1]))
        gone = [member for member in before if member not in self._members]
        named = self._lost_of(before) or f"ranks {gone}, which did not answer"
        words = f"lost: {named}" if gone else "all are there: they have connected anew"
        self._adapt(int(furthest["passes"]), words, agreed=agreed)

    def _adapt(self, passes: int, words: str, **more: Any) -> None:
        before, mesh = self._known_as, self._transport.mesh
        self._known_as = mesh.replica, mesh.replicas
        self._run.regrouped(self._generation + self._tried, before, passes, words, **more)

    def _be(self, members: list[int]) -> None:
        """Raises TransportError: one of them cannot be reached from here."""
        with self._changed:
            self._members = members
        try:
            self._hosts.now(members)
        except RuntimeError as error:
            raise TransportError(f"rank {self._me}: {error}") from error

    def _furthest(self, posts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        most = {**max(posts, key=lambda post: int(post["done"]))}
        for name in ("passes", "tried", "agreed"):
            most[name] = max(post[name] for post in posts)
        if most["done"] > self._done + 1:
            raise DesyncError(
                f"rank {self._me} has done {self._done} of the steps, evaluations and saves that "
                f"another rank has done {most['done']} of; resume from a checkpoint (--resume)"
            )
        return most
