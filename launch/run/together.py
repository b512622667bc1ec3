"""All ranks make the same calls of a run, or a sentence says which rank makes another.

Every rank says in the run's store which call it makes. Before those that ranks could make alone, it
waits until all others have said the same. A step only says it: its messages join the ranks.
"""

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.config.toml import ConfigError
from thinpipe.pipeline.comm.errors import TransportError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # mostly all come at once; doubled
_REMEMBERED = 8
"""Of a rank's last calls: it cannot be further ahead of one that it will have to wait for."""


class _Call(NamedTuple):
    """A call, the `number`-th besides steps, after `done` steps."""

    number: int
    name: str
    done: int


class Together:
    """One rank's calls."""

    def __init__(self, store: Store, rank: int, world: int, *, wait_s: float) -> None:
        """Others are waited for `wait_s` seconds."""
        self._store = PrefixStore("calls", store)
        self._rank, self._wait_s = rank, wait_s
        self._others = [other for other in range(world) if other != rank]
        self._calls: deque[_Call] = deque([_Call(0, "", -1)], _REMEMBERED)

    def step(self, done: int) -> None:
        """This rank makes the step after `done`. Nobody waits for the message."""
        self._say(done)

    def passes(self, name: str, done: int) -> None:
        """This rank makes another call, in which it will not wait for the others here."""
        self._calls.append(_Call(self._calls[-1].number + 1, name, done))
        self._say(-1)

    def meet(self, name: str, done: int) -> None:
        """Wait until all ranks make this call.

        Raises:
            ConfigError: one makes another.
            TransportError: one makes none in time.
        """
        self.passes(name, done)
        missing, began_s, pause_s = list(self._others), time.monotonic(), _FIRST_PAUSE_S
        while missing := [rank for rank in missing if not self._is_there(rank)]:
            if time.monotonic() - began_s > self._wait_s:
                raise TransportError(
                    f"{name}: rank {missing[0]} did not call it within {self._wait_s:.0f} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _say(self, step: int) -> None:
        if self._others:
            with _told_as_lost():
                self._store.set(str(self._rank), json.dumps([step, *self._calls]))

    def _is_there(self, rank: int) -> bool:
        """Whether a rank makes this rank's last call, or has made it."""
        with _told_as_lost():
            if not self._store.check([str(rank)]):
                return False
            step, *calls = json.loads(self._store.get(str(rank)))
        mine = self._calls[-1]
        its = {call.number: call for call in (_Call(*fields) for fields in calls)}
        if min(its) > mine.number or its.get(mine.number) == mine:
            return True
        if mine.number in its:
            instead = its[mine.number].name
        elif step >= mine.done:
            instead = "the next step"
        else:
            return False  # still on its way here
        raise ConfigError(
            f"after step {mine.done} rank {self._rank} makes the call {mine.name}, and rank {rank} "
            f"goes on to {instead}: all ranks are needed for either; make every call of a run on "
            "every rank, none inside `if rank == 0`"
        )


@contextlib.contextmanager
def _told_as_lost() -> Iterator[None]:
    """A store that is gone is a lost connection: a rank then says which machines it misses."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError("the machine that holds the run's store is gone") from error
