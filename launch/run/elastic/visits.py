"""A replica that comes later is let in: a section of its own, between two steps.

First all members say on the old groups that they have come to it. Then all make groups with the
newcomers, who get replica 0's state. If a rank is lost meanwhile, those who are left end that
section as they end others. Newcomers that cannot be let in never end the run.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.gloo_backend import Pair, pair
from thinpipe.launch.net.ranks.group import Newcomer
from thinpipe.launch.run.elastic.door import Door
from thinpipe.launch.run.elastic.joining import JoiningStore
from thinpipe.launch.run.elastic.parts import bring_together
from thinpipe.launch.run.elastic.sections import Sections
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport

if TYPE_CHECKING:
    from thinpipe.launch.run.elastic.training import ElasticTraining

_ASK_AGAIN_S = 5.0
"""An agreement may be lost with a rank."""
_POLL_S = 0.02
_CONNECT_S = 15.0
"""For a newcomer that has said that it is there; without it all is sent when it is let in."""


class Elastic(Sections):
    """`Sections` that let others in."""

    def __init__(
        self,
        store: Store,
        transport: GlooTransport,
        run: "ElasticTraining",
        *,
        newcomer: Newcomer | None = None,
        **settings: Any,
    ) -> None:
        """As `Sections`; a newcomer joins the run that `store` is of.

        Its `transport` connects the ranks of its own replica.
        """
        own, mesh = PrefixStore("elastic", store), transport.mesh
        self._before: list[int] = []  # a newcomer comes
        self._door, self._newcomer, self._seats = Door(own), newcomer, mesh.world_size
        members = newcomer.numbers(self._door.numbers, mesh) if newcomer else ()
        super().__init__(store, transport, run, members=members, **settings)
        if self.number == 0:
            self._door.open(mesh.world_size)
            door = Door(PrefixStore("elastic", store.clone()))  # type: ignore[attr-defined]
            threading.Thread(target=self._greet, args=(door,), daemon=True).start()
            if mesh.pipeline_ranks > 1:
                parts = store.clone(), mesh.pipeline_ranks  # type: ignore[attr-defined]
                threading.Thread(target=bring_together, args=parts, daemon=True).start()
        self._gives = False
        if newcomer is None:
            self._give_if_first()

    def admit(self) -> None:
        """Let in who was invited, if anybody; all members call it after the same step.

        Raises:
            TransportError: a peer is lost, and the run does not go on without it.
        """
        self.together(self._admit)
        self._visits, self._warm = self._tried, {*self._members}
        self._news.tell()

    def join(self) -> None:
        """Have the members let this newcomer in, with the other ranks of its replica; a collective.

        Raises:
            ConfigError: they do not.
            CheckpointError: this machine has saved what the run does not go on from.
            TransportError: another of these ranks is lost.
        """
        own, newcomer = self._members, self._newcomer
        assert newcomer is not None
        newcomer.say(self.number)
        self._transport.share(torch.zeros(0, dtype=torch.float64), "world")
        try:
            self._knock(own, newcomer)
            self.admit()
        except BaseException:
            with suppress(RuntimeError):
                self._leaving.report(
                    self.number, f"rank {self.number} on {self._hosts.own}: not joined"
                )
            raise
        newcomer.take_part()

    def _knock(self, own: Sequence[int], newcomer: Newcomer) -> None:
        """Wait to be let in."""
        place = self._transport.mesh.rank
        is_asked = takes = False
        before = (0, 0)

        def check() -> bool:
            nonlocal is_asked, takes, before
            newcomer.check()
            if self._news.is_incomplete():
                raise TransportError(f"rank {self.number}: {self.loss}")
            if not self._losses.is_open:
                raise ConfigError("--join: the run has ended")
            if not is_asked:
                is_asked = self._answer(own, place)
            elif not takes:
                takes = self._take(own, place)
            last, before = before, (self._run.came, self._door.served())
            return last != before

        try:
            if place == 0:
                self._door.knock(own)
            how = self._door.enter(own, self._wait_s, check)
        except TimeoutError:
            raise ConfigError(
                f"--join: the run did not let this replica in within {self._wait_s:.0f} s "
                "(pipeline.peer_timeout_s): it has all its replicas, or makes no steps"
            ) from None
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise ConfigError("--join: the run has ended") from None
        newcomer.has_entered = True
        self._news.generation, self._done = how["generation"], how["done"]
        self._visits = how["visits"]
        self._tried, self._before = self._visits, how["members"]
        self._warm = {*self._before}

    def _answer(self, own: Sequence[int], place: int) -> bool:
        """Say that these are there once the run asks; whether it has."""
        if at := self._door.asked(own):
            self._run.check_own(at)
            if place == 0:
                self._door.answer(own)
        return bool(at)

    def _take(self, own: Sequence[int], place: int) -> bool:
        """Whether the state is sent; it is taken then."""
        # not before: others may get theirs first, for longer than a connection waits
        if givers := self._door.givers(own):
            self._run.take(partial(self._connect, givers[place], self.number))
            return True
        if place == 0 and self._door.is_late(own):
            self._door.knock(own)
        return False

    def _admit(self) -> None:
        if self._tried <= self._visits:
            if not self._is_invited():
                return
            self._let_in(self._door.invited(self._visits))
        if self._newcomer is not None and self.number in self._cold:
            self._newcomer.check()
        if self._cold:
            self._run.bring_up([self._members.index(member) for member in self._cold])
        try:
            self._run.prove_equal()
        except ConfigError as error:  # a newcomer that is at fault must not end the run
            if not self._cold or self.number in self._cold:
                raise
            raise TransportError(str(error)) from error
        self._proven = True

    def _is_invited(self) -> bool:
        """Whether anybody is; all members have come here. Member 0 says it: some ask twice."""
        if self.number not in self._warm:
            return True
        self._run.end_saves()  # which use the groups
        own = float(self.number == 0 and bool(self._door.invited(self._visits)))
        said = self._transport.share(torch.tensor([own], dtype=torch.float64), "world")
        return bool(said.max())

    def _let_in(self, invited: Sequence[int]) -> None:
        """Make groups with newcomers. Who has begun that is followed by all, see `_regroup`."""
        before = [member for member in self._members if member not in invited]
        if self.number in invited:
            before = self._before
        elif self.number == 0:
            how = {"generation": self._generation, "done": self._done, "members": before}
            self._door.let_in(invited, {**how, "visits": self._visits})
        self._tried = self._visits + 1
        self._be([*before, *invited])
        self._form(f"visit{self._visits}")
        passes = gather_json(self._transport, self._run.passes)
        hosts = ", ".join(dict.fromkeys(self._hosts.of(number) for number in invited))
        came = f"joined: {hosts}, as rank{'s' * (len(invited) > 1)} {', '.join(map(str, invited))}"
        self._adapt(max(passes), came)

    def _greet(self, door: Door) -> None:
        """Invite who knocks, one replica after another, if one of the run's is missing."""
        sent = 0
        with suppress(RuntimeError):  # the store is gone, which ends the process
            for number in count(1):
                numbers = door.knocked(number)
                if len(numbers) != self._transport.mesh.pipeline_ranks:
                    continue
                if self._has_room(numbers) and door.is_there(numbers, self._run.at):
                    sent += 1
                    if not self._is_sent(door, sent, numbers):
                        continue
                    visit = self._visits  # read once: it grows as others are let in
                    door.invite(visit, numbers)
                    self._run.welcome()
                    while not self._is_over(visit):
                        door.serve()
                        if self._tried <= visit:
                            self._run.welcome()

    def _is_sent(self, door: Door, number: int, newcomers: Sequence[int]) -> bool:
        """Have replica 0 send its state, and wait until it has; False if these are lost before."""
        door.begin(number, newcomers, self._replicas[0])
        while not door.have_sent(number, self._transport.mesh.pipeline_ranks):
            if self._news.lost.keys() & {*newcomers}:
                return False
            door.serve()
            time.sleep(_POLL_S)
        return True

    def _adapt(self, *arguments: Any, **more: Any) -> None:
        super()._adapt(*arguments, **more)
        self._give_if_first()

    def _give_if_first(self) -> None:
        if self._transport.mesh.replica == 0 and not self._gives:
            self._gives, store = True, self._root.clone()  # type: ignore[attr-defined]
            threading.Thread(target=self._give, args=(store,), daemon=True).start()

    def _give(self, store: Store) -> None:
        """Send this rank's state to those that come, behind what training sends; a thread."""
        door, place = Door(PrefixStore("elastic", store)), self._transport.mesh.position
        with suppress(RuntimeError):  # the store is gone, which ends the process
            for number in count(1):
                newcomers, sent = door.begun(number), partial(door.has_sent, number, place)
                if door.givers(newcomers)[place] != self.number:  # who was in this place is lost
                    sent()
                    continue
                newcomer = newcomers[place]
                try:
                    self._run.give(self._connect(newcomer, newcomer)[0], sent)
                except TransportError:  # it gets all when it is let in, or is lost
                    pass
                except Exception as error:  # which must hold up no other newcomer
                    self._run.display.note(f"a state is sent while all wait: {error}")
                sent()

    def _connect(self, other: int, newcomer: int) -> Pair:
        """A connection of a newcomer with another; raises TransportError if that does not come."""
        try:
            self._hosts.reach(other)
        except RuntimeError as error:
            raise TransportError(str(error)) from error
        store = PrefixStore(f"ahead/{newcomer}", self._root.clone())  # type: ignore[attr-defined]
        own = self._newcomer if self.number == newcomer else None
        waits = JoiningStore(
            store,
            # nor does the other end come if a newcomer is let in before that
            lambda: newcomer in self._news.lost or (own is not None and own.has_entered),
            _CONNECT_S if own is None else self._wait_s,
        )
        lost = self._news.lost
        return pair(waits, int(self.number == newcomer), self._wait_s, lambda: newcomer in lost)

    def _is_over(self, visit: int) -> bool:
        with self._news.changed:
            return self._news.changed.wait_for(lambda: self._visits > visit, _ASK_AGAIN_S)

    def _has_room(self, newcomers: Sequence[int]) -> bool:
        """Wait until there is; False if these are lost before."""
        lost = self._news.lost.keys()
        with self._news.changed:
            self._news.changed.wait_for(
                lambda: (
                    bool(lost & {*newcomers}) or len(self._members) + len(newcomers) <= self._seats
                )
            )
            return not lost & {*newcomers}
