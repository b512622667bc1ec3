"""A run goes on without replicas that it loses, in the same processes ([elastic] min_replicas).

When a rank is lost, the others agree on the next *generation* of ranks and make process groups of
it. If nobody says who was lost (`news.py`), but a peer is silent for `wait_s` or a connection is
lost, all are woken up, and who does not come here in time is lost. If all come, they connect anew.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.terminal import end_now
from thinpipe.launch.net.ranks.failures import LOST, OUT, Losses
from thinpipe.launch.net.ranks.gloo_backend import PORTS
from thinpipe.launch.run.elastic.hosts import Hosts
from thinpipe.launch.run.elastic.joining import JoiningStore, join_anew
from thinpipe.launch.run.elastic.news import SOON_S, News
from thinpipe.pipeline.comm.errors import SilentError, TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport

if TYPE_CHECKING:
    from thinpipe.launch.run.elastic.training import ElasticTraining

_POLL_S = 0.005  # only while ranks regroup: training stands still for it
_WOKEN_S = 0.06
"""In which other threads see that connections are broken (`abandoned.py`)."""
_TRIES = 3
"""To connect anew where none is lost."""


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
        a connection is lost. Ranks that come later are the `members` of their own transport at
        first.

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
        numbers = [*(members or range(mesh.world_size))]
        self.number = numbers[mesh.rank]
        """This rank's, which no other has or had."""
        self._hosts = Hosts(self._store, self.number, host)
        # newcomers have no generation until they are let in
        self._news = News(numbers, -1 if members else 0, self._hosts.ports)
        self._visits = self._tried = 0  # sections that let newcomers in: done, and begun
        self._warm = {*numbers}
        self._losses = Losses(store)
        self._hosts.now(numbers)
        # a connection for each thread: a wait in one would hold up the others
        self._own = PrefixStore("elastic", store.clone())  # type: ignore[attr-defined]
        if not members:
            self._losses.open(wait_s)
        self._leaving = Losses(store.clone())  # type: ignore[attr-defined]  # not in its stubs
        self._news.follow(store.clone(), run.interrupt, self._leave_out)  # type: ignore[attr-defined]
        self._hosts.watch(store.clone(), patience_s)  # type: ignore[attr-defined]

    def close(self) -> None:
        """The last section is done."""
        self._losses.close()

    def needed_for(self) -> str:
        """Why not all ranks of this machine may leave; empty if they may.

        Machines ask one after another; who may leave counts as gone. Called by another thread.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._hosts.is_needed:
            return "it has rank 0 or the run's store (--rdzv)"
        own, said = self._hosts.own_ranks, ""
        while True:
            leave = {*json.loads(said or "[]")}
            with self._news.changed:
                left = self._left({*own, *leave, *self._news.lost})
                others = {self._hosts.of(m) for m in self._members if m in leave - {*own}}
            if not self._are_enough(left):
                too = f"; {', '.join(sorted(others))} may leave, too" if others else ""
                return self._why_not(left) + too
            mine = json.dumps(sorted({*own, *leave}))
            if (found := self._own.compare_set("leave", said, mine).decode()) == mine:
                return ""
            said = found

    def leave(self, why: str) -> None:
        """Have the others go on without this rank, which ends. Called by any thread.

        Raises:
            RuntimeError: the store is gone.
        """
        self._leaving.report(self.number, why)

    @property
    def hosts(self) -> Mapping[int, str]:
        """The machines of the ranks that are in the run, by their numbers."""
        return {member: self._hosts.of(member) for member in self._members}

    @property
    def machines(self) -> list[int]:
        """For each rank the first on its machine."""
        return self._hosts.machines(self._members)

    @property
    def loss(self) -> str:
        """Who was lost, as long as the run goes on to the next generation."""
        return self._news.lost_of(self._members)

    @property
    def trouble(self) -> str:
        """Why nothing comes any more, as long as connections are broken."""
        return self.loss or ("connections are made anew" if self._news.is_broken() else "")

    @property
    def _members(self) -> list[int]:
        return self._news.members

    @property
    def _generation(self) -> int:
        return self._news.generation

    @property
    def _replicas(self) -> list[list[int]]:
        return self._as_replicas(self._members)

    def _as_replicas(self, members: Sequence[int]) -> list[list[int]]:
        size = self._transport.mesh.pipeline_ranks
        return [[*members[at : at + size]] for at in range(0, len(members), size)]

    @property
    def _cold(self) -> list[int]:
        """Members that have no state yet."""
        return [member for member in self._members if member not in self._warm]

    def _leave_out(self, member: int) -> None:
        """One that is lost before it was let in."""
        if self.number == 0:
            self._leaving.settle(member, goes_on=True)

    def _regroup(
        self, error: TransportError, post: Mapping[str, Any]
    ) -> tuple[list[int], list[dict[str, Any]]]:
        """Form the next generation, or raise: who was lost, and what each of its ranks posts."""
        tries, before = 0, self._members
        while True:
            if not self._goes_on(error) or tries == _TRIES:
                raise error
            self._end_jobs()
            self._news.generation += 1
            members = self._agree(post)
            self._settle(members, error)
            try:
                self._be(members)
                self._form(f"generation{self._generation}")
            except TransportError as again:
                error, tries = again, tries + (not self._news.is_incomplete())
                continue
            self._warm &= {*members}
            return [member for member in before if member not in members], self._posts(members)

    def _end_jobs(self) -> None:
        """Nothing of this generation may send in the next: else this rank is lost, or all fail."""
        try:
            self._run.settle()
        except TimeoutError:
            why = f"rank {self.number} on {self._hosts.own}: its exchange does not end"
            left = Generations._choose(self, {self.number})
            if not self._are_enough(left):
                raise TransportError(f"{why}; {self._why_not(left)}") from None
            with suppress(RuntimeError):  # the store is gone, which ends the process
                self.leave(why)
            out = self._hosts.own in self._hosts.of_all([self.number])
            end_now(OUT if out else LOST, f"{why}: {self._left_out}")

    def _settle(self, members: Sequence[int], error: TransportError) -> None:
        """Tell those who are lost what becomes of them; who is lost itself ends."""
        lost = [member for member in self._members if member not in members]
        goes_on, out = self._are_enough(members), self._hosts.of_all(lost)
        for member in lost:
            self._losses.settle(member, goes_on=goes_on, out=self._hosts.of(member) in out)
        if not goes_on:
            raise TransportError(f"{error}; {self._why_not(members)}") from error
        if self.number not in members:
            if self.number in self._cold:
                end_now(1, f"rank {self.number}: a rank was lost as it joined; start it again")
            if self._run.leaves:
                self._run.leave_now()
            code = OUT if self._hosts.own in out else LOST
            end_now(code, f"rank {self.number}: {self._left_out}")

    def _are_enough(self, members: Sequence[int]) -> bool:
        return len(members) >= self._least * self._transport.mesh.pipeline_ranks and 0 in members

    def _why_not(self, members: Sequence[int]) -> str:
        if not members:
            return "no replica is left, nor ranks of all its stages"
        if 0 not in members:
            local = "" if self._run.steps_are_joint else "; with local steps none is completed"
            return f"replica 0 writes the run's folder: without it the others do not go on{local}"
        left = len(members) // self._transport.mesh.pipeline_ranks
        return f"replicas left: {left}, fewer than elastic.min_replicas = {self._least}"

    def _goes_on(self, error: TransportError) -> bool:
        with suppress(RuntimeError):  # the store is gone, which ends the process
            self._store.set(f"here/{self._generation}/{self.number}", "")
            return self._misses_some(error) or self._blames_newcomers(error)
        return False

    def _misses_some(self, error: TransportError) -> bool:
        """Whether one is lost, or all are here and may connect anew."""
        is_silent = isinstance(error, SilentError)
        # a doubt too early does no harm: news of a loss may still come
        soon_s = SOON_S if self._connects_anew else None
        asks = is_silent or not self._news.hears(self._news.is_broken, soon_s)
        if asks and not is_silent and not self._connects_anew:
            return False
        if asks and not self._news.is_incomplete():
            self._losses.doubt(self._generation)
        # who computes has not heard that a connection is lost
        silent = self._not_at("here", self._comes_in_s(is_silent), self._news.is_incomplete)
        if not silent and self._news.hears(self._news.is_broken) and not self._news.is_incomplete():
            time.sleep(_WOKEN_S)
            return self._connects_anew and not self._cold
        for member in silent if asks and not self._news.is_incomplete() else ():
            who = f"rank {member} on {self._hosts.of(member)}"
            self._leaving.report(member, f"{who}: does not answer")
        return self._news.hears(self._news.is_incomplete)

    def _comes_in_s(self, is_silent: bool) -> float:
        """How long a rank may take to come here that is well; `is_silent`: it was waited for."""
        return self._patience_s if is_silent else self._wait_s

    def _not_at(self, point: str, wait_s: float, is_over: Callable[[], bool]) -> set[int]:
        """Members that are not lost, and do not come to this point within so many seconds."""
        limit_s = time.monotonic() + wait_s
        while True:
            with self._news.changed:  # a loss counts once connections are broken
                awaited = {*self._members} - self._news.lost.keys()
            keys = {member: f"{point}/{self._generation}/{member}" for member in awaited}
            if not keys or self._store.check([*keys.values()]):  # one round trip for all
                return set()
            if is_over() or time.monotonic() > limit_s:
                return {member for member, key in keys.items() if not self._store.check([key])}
            time.sleep(_POLL_S)

    def _blames_newcomers(self, error: TransportError) -> bool:
        """Whether there are some, who must not end the run: they count as lost."""
        for member in self._cold:
            self._leaving.report(member, f"rank {member} did not come in ({error})")
        return bool(self._cold) and self._news.hears(self._news.is_incomplete)

    def _agree(self, post: Mapping[str, Any]) -> list[int]:
        """Who is in the next generation: the first to see all others ready, or lost, says it."""
        self._store.set(f"ready/{self._generation}/{self.number}", json.dumps(post))
        said = f"members/{self._generation}"
        waiting = self._not_at("ready", self._wait_s, lambda: self._store.check([said]))
        chosen = json.dumps(self._choose(waiting))
        members: list[int] = json.loads(self._store.compare_set(said, "", chosen))
        return members

    def _posts(self, members: Sequence[int]) -> list[dict[str, Any]]:
        keys = [f"ready/{self._generation}/{member}" for member in members]
        return [*map(json.loads, self._store.multi_get(keys))]

    def _choose(self, silent: Set[int]) -> list[int]:
        """The next members: replicas without ranks that are lost, or `silent` for too long.

        Nor with those that may leave (`needed_for`): they leave now, if the others are enough.
        """
        with self._news.changed:
            gone = silent | self._news.lost.keys()
        leave = json.loads(self._store.get("leave")) if self._store.check(["leave"]) else ()
        stay = self._left(gone | {*leave})
        return stay if self._are_enough(stay) else self._left(gone)

    def _left(self, gone: Set[int]) -> list[int]:
        replicas = whole(self._replicas, gone)
        if self._run.steps_are_joint:
            replicas = made_whole(self._replicas, gone, cold={*self._cold})
        return [*chain(*replicas)]

    def _form(self, name: str) -> None:
        """Make the groups of the members; raises TransportError if another rank is lost."""
        if self._news.is_incomplete():
            raise TransportError(f"rank {self.number}: another rank is lost")
        keys, size = PrefixStore(name, self._root), len(self._members)
        generation = self._news.generation

        def is_over() -> bool:  # also for a thread that torch leaves behind
            return self._news.is_incomplete() or self._news.generation != generation

        self._joining = JoiningStore(keys, is_over, self._wait_s)
        join_anew(self._joining, self._members.index(self.number), size, self._wait_s)
        self._transport.regroup(size // self._transport.mesh.pipeline_ranks)
        if self._news.break_if_incomplete():
            raise TransportError(f"rank {self.number}: another rank was lost meanwhile")

    def _be(self, members: list[int]) -> None:
        """Raises TransportError: one of them cannot be reached from here."""
        with self._news.changed:
            self._news.members = members
        try:
            self._hosts.now(members)
        except RuntimeError as error:
            raise TransportError(f"rank {self.number}: {error}") from error


def whole(replicas: Sequence[Sequence[int]], gone: Set[int]) -> list[list[int]]:
    """Of these replicas, those that have lost no rank."""
    return [[*ranks] for ranks in replicas if not gone & {*ranks}]


def made_whole(
    replicas: Sequence[Sequence[int]], gone: Set[int], *, cold: Set[int]
) -> list[list[int]]:
    """Also those that ranks of broken ones are together, each in its own stage.

    Rank 0 writes the run's folder: its replica takes ranks of the last whole one if it must. Ranks
    that are `cold` have no state, and complete no other replica.
    """
    left = whole(replicas, gone)
    broken = [ranks for ranks in replicas if gone & {*ranks}]
    made = _together(broken, gone | cold)
    others = [ranks for ranks in left if 0 not in ranks and not cold & {*ranks}]
    if 0 not in gone and others and not any(0 in ranks for ranks in [*left, *made]):
        left.remove(others[-1])
        made = _together([*broken, others[-1]], gone | cold)
    return sorted([*left, *made])


def _together(broken: Sequence[Sequence[int]], gone: Set[int]) -> list[list[int]]:
    stages = ([rank for rank in ranks if rank not in gone] for ranks in zip(*broken, strict=True))
    return [[*ranks] for ranks in zip(*stages, strict=False)]
