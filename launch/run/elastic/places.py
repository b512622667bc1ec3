"""A pipeline without replicas goes on if a machine is lost: another one takes its place.

All then go back to the newest step of which copies of all stages are left in RAM (`copies.py`), and
do the steps since then again. A machine is lost as a whole, as another can join only in its place.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.terminal import end_now
from thinpipe.launch.net.ranks.failures import OUT, Losses
from thinpipe.launch.net.ranks.gloo_backend import Pair, pair
from thinpipe.launch.net.ranks.group import Newcomer
from thinpipe.launch.run.elastic.copies import newest_common
from thinpipe.launch.run.elastic.door import Door
from thinpipe.launch.run.elastic.hosts import say_where
from thinpipe.launch.run.elastic.joining import JoiningStore
from thinpipe.launch.run.elastic.sections import Sections
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.mesh import Mesh

if TYPE_CHECKING:
    from thinpipe.launch.run.elastic.redoing import RedoingTraining

_POLL_S = 0.1  # machines come after seconds; spare ones wait here for as long as the run takes
_T = TypeVar("_T")


class WentBackError(Exception):
    """All have gone back to an earlier step."""


@dataclass(frozen=True)
class Call:
    """A rank that joins, as number so many, is wanted in a generation of these members."""

    number: int
    generation: int
    members: list[int]

    @property
    def place(self) -> int:
        return self.members.index(self.number)


@dataclass(frozen=True)
class Back:
    """All go back to a `step`."""

    step: int
    holders: dict[int, int]
    """For places of others, who have no state, the place that has a copy for it."""
    done: int
    """The steps that were done."""
    epoch: int
    """In which the run is."""


def wait_for_call(newcomer: Newcomer, mesh: Mesh, host: str) -> Call:
    """Wait until places are free for the ranks of this machine, which `mesh` is of.

    Raises:
        ConfigError: the run has ended.
        TerminatedError: this process was asked to stop.
    """
    store, losses = PrefixStore("elastic", newcomer.store), Losses(newcomer.store)
    try:
        numbers = newcomer.numbers(Door(store).numbers, mesh)
        number = numbers[mesh.rank]
        say_where(store, number, host)
        newcomer.say(number)
        if mesh.rank == 0:
            store.set(f"spare/{store.add('spares', 1)}", json.dumps(numbers))
        while not store.check([f"called/{number}"]):
            newcomer.check()
            if not losses.is_open:
                raise ConfigError("--join: the run has ended")
            time.sleep(_POLL_S)
        generation, members = json.loads(store.get(f"called/{number}"))
    except RuntimeError:
        raise ConfigError("--join: the run has ended") from None
    return Call(number, generation, members)


@contextmanager
def answering(newcomer: Newcomer, call: Call) -> Iterator[None]:
    """What fails here is told to those who have called."""
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):
            Losses(newcomer.store).report(call.number, f"rank {call.number} failed: {error}")
        raise


class Places(Sections):
    """`Sections` of as many ranks as there are places."""

    _left_out = "the others go on with another machine in the place of this one"
    _connects_anew = False  # one may have done a step that another has not

    def __init__(
        self,
        store: Store,
        transport: GlooTransport,
        run: "RedoingTraining",
        *,
        newcomer: Newcomer | None = None,
        call: Call | None = None,
        **settings: Any,
    ) -> None:
        """As `Sections`; a newcomer was called."""
        super().__init__(store, transport, run, members=call.members if call else (), **settings)
        self.root = self._store
        self._redoing, self._newcomer = run, newcomer
        self._back: Back | None = None
        self._comes_in = call is not None
        if call is not None:
            self._news.generation, self._warm = call.generation, {*call.members} - {self.number}
        elif self.number == 0:
            Door(self._store).open(transport.mesh.world_size)

    def step(self, do: Callable[[], _T], forget: Callable[[], None]) -> _T:
        """A section that need not be counted, as steps are.

        Raises:
            WentBackError: it was not done.
            TransportError: as in `together`.
        """
        while True:
            try:
                self.prove()
                return do()
            except TransportError as error:
                before = self._members
                furthest = self._regrouped(error)
                forget()
                self._tell(furthest, before)

    def take_place(self) -> Back:
        """Called by a newcomer, once: come in; to where all have gone back."""
        with suppress(WentBackError):
            self.together(lambda: None)
        assert self._back is not None, "there is somebody who has no state"
        return self._back

    def prove(self) -> None:
        """Go back, if one of the others is new.

        Raises:
            WentBackError: all did.
            TransportError: a peer is lost.
        """
        if self._comes_in:
            self._comes_in = False
            self._come_in()
        if self._back is not None and self._cold:
            self._redoing.go_back(self._back)
            self._warm = {*self._members}
            if self._newcomer is not None:
                self._newcomer.take_part()
                self._newcomer = None
            raise WentBackError

    def connect(self, store: Store, source: int, end: int) -> Pair:
        """Connect the copies of the rank at place `source` with who keeps them.

        Raises:
            TransportError: the other end does not come.
        """
        waits = JoiningStore(store, lambda: bool(self.loss), self._wait_s)
        return pair(waits, end, self._wait_s, lambda: bool(self.loss))

    @property
    def goes_back_to(self) -> int:
        assert self._back is not None, "a place has been taken"
        return self._back.step

    @property
    def places(self) -> list[str]:
        return [self._hosts.of(member) for member in self._members]

    def _come_in(self) -> None:
        assert self._newcomer is not None, "it was called"
        self._newcomer.has_entered = True
        self._store.set(f"ready/{self._generation}/{self.number}", json.dumps(self._post()))
        self._be(self._members)
        self._form(f"generation{self._generation}")
        before = self._members
        self._tell(self._furthest(self._posts(before)), before)

    def _post(self) -> dict[str, Any]:
        has_state = self.number in self._warm
        own = {"has": self._redoing.held if has_state else None, "at": self._redoing.point}
        return super()._post() | own

    def _choose(self, silent: Set[int]) -> list[int]:
        """Those of machines that are all there, and others in the places of those that are not."""
        limit_s, known = time.monotonic() + self._wait_s, None
        while time.monotonic() < limit_s:
            stay = self._staying(silent)
            if stay != known:
                known = stay
                if not self._waits_for_others(stay):
                    break
            if (members := self._filled(stay)) is not None:
                return members
            time.sleep(_POLL_S)
        return known or []

    def _filled(self, stay: Sequence[int]) -> list[int] | None:
        """The members, with as many ranks of others for each lost machine; None if too few came."""
        members, spares = [*self._members], self._spares()
        for host in dict.fromkeys(self._hosts.of(m) for m in self._members if m not in stay):
            places = [place for place, name in enumerate(self.places) if name == host]
            other = next((ranks for ranks in spares if len(ranks) == len(places)), None)
            if other is None:
                return None
            spares.remove(other)
            for place, number in zip(places, other, strict=True):
                members[place] = number
        return members

    def _waits_for_others(self, stay: Sequence[int]) -> bool:
        """Whether it can go on with others; lost machines leave at once then, to make room."""
        if 0 not in stay or self._why_over(stay):
            return False
        if self.number not in stay:
            end_now(OUT, f"rank {self.number}: {self._left_out}")
        for member in {*self._members} - {*stay}:
            self._losses.settle(member, goes_on=True, out=True)
        if self.number == 0:
            ranks = len(self._members) - len(stay)
            self._redoing.ask_for_machine(self._news.lost_of(self._members), ranks)
        return True

    def _staying(self, silent: Set[int]) -> list[int]:
        with self._news.changed:
            gone = silent | self._news.lost.keys()
        hosts = {self._hosts.of(member) for member in self._members if member in gone}
        return [member for member in self._members if self._hosts.of(member) not in hosts]

    def _spares(self) -> list[list[int]]:
        """The ranks of each machine that has come, and has neither lost nor member ranks."""
        count = self._store.add("spares", 0)
        keys = [f"spare/{number}" for number in range(1, count + 1)]
        machines = [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]
        with self._news.changed:
            gone = self._news.lost.keys() | {*self._members}
        return [ranks for ranks in machines if not gone & {*ranks}]

    def _why_over(self, stay: Sequence[int]) -> str:
        """Why the run cannot go on with others; nothing if it can."""
        posts = self._posts(stay)
        if any(post["at"] is None for post in posts):
            return "the run is about to end"
        places = map(self._members.index, stay)
        held = {at: post["has"] for at, post in zip(places, posts, strict=True) if post["has"]}
        if not held or newest_common(held, len(self._members)) is None:
            return "of no step all copies are left in RAM (checkpoint.ram_every)"
        return ""

    def _are_enough(self, members: Sequence[int]) -> bool:
        return len(members) == len(self._members)

    def _why_not(self, members: Sequence[int]) -> str:
        if 0 not in members:
            return "the machine of rank 0 writes the run's folder: nobody can take its place"
        return self._why_over(members) or (
            f"no machine came in its place within {self._wait_s:.0f} s (pipeline.peer_timeout_s): "
            "start one with --join"
        )

    def _be(self, members: list[int]) -> None:
        call = json.dumps([self._generation, members])
        for member in members:
            if member not in self._members:
                self._store.set(f"called/{member}", call)
        super()._be(members)

    def _furthest(self, posts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        held = {place: post["has"] for place, post in enumerate(posts) if post["has"]}
        step = newest_common(held, len(posts))
        assert step is not None, "as was seen before"
        holders = {
            place: next(p for p, has in held.items() if [place, step] in has["kept"])
            for place in range(len(posts))
            if place not in held
        }
        furthest = max((posts[place] for place in held), key=lambda post: int(post["done"]))
        done = max(posts[place]["at"][0] for place in held)
        self._back = Back(step, holders, done, furthest["at"][1])
        if self.number not in self._warm:
            self._done = int(furthest["done"])
        return super()._furthest(posts)
