"""All ranks save, or stop, after the same step, though no step waits for all ranks.

A rank that wants it says so in the run's store. A thread of every rank answers with the step that
its training will reach next, and training waits there until all have answered: as long as a message
to the store and back. The greatest of the answers is the step. Threads answer, so no rank waits for
one whose training waits for it.

When a rank is lost, some of the others may have heard all answers, and some not. So an agreement
is over for a rank as soon as it learns of a loss (`release`); those who are left compare what they
have heard as they regroup, and make another.
"""

import contextlib
import json
import threading
from collections.abc import Callable
from enum import IntEnum
from itertools import count

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.ranks.store import await_key
from thinpipe.pipeline.comm.errors import TransportError

_OVER = "over"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
"""Between two looks for answers: mostly they come at once."""


class Ask(IntEnum):
    """Requests to all ranks after a step; the greatest counts."""

    NOTHING = 0
    SAVE = 1
    ADMIT = 2
    STOP = 3


class Agreement:
    """One rank's part in it, from the first step on."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        done: int,
        wait_s: float,
        on_stop: Callable[[int], None] = lambda _step: None,
        agreed: tuple[int, int] = (0, Ask.NOTHING),
    ) -> None:
        """`done` steps are done; training waits `wait_s` seconds for the answers of all ranks.

        `agreed`: a step and what all do after it, if the others have come to it before this rank.
        `on_stop` is told, on every rank, after which step all stop.
        """
        self._store = PrefixStore("agreement", store)
        self._own = self._store.clone()  # type: ignore[attr-defined]  # not in its stubs
        self._rank, self._world, self._on_stop = rank, world, on_stop
        self._wait_s, self._changed = wait_s, threading.Condition()
        self._next = done + 1
        self._round, self._wanted, self._answered = 0, Ask.NOTHING, False
        self._agreed = (agreed[0], Ask(agreed[1]))
        self.last = (0, Ask.NOTHING)
        """The step after which all did something last, and what."""
        self._stops = threading.Event()
        self._is_over = False
        self._heir: Agreement | None = None
        self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)
        self._thread.start()

    def ask(self, what: Ask) -> None:
        """Have all ranks do it after a step that is soon; asking again changes nothing."""
        with self._changed:
            heir, number = self._heir, self._round
            if heir is None:
                if what <= max(self._wanted, self._agreed[1]):
                    return
                self._wanted = what
        if heir is None:
            self._store.set(str(number), "")
        else:
            heir.ask(what)

    def stop_all(self) -> threading.Event:
        """Ask for a stop; the event is set once all know after which step that is."""
        with contextlib.suppress(RuntimeError):  # the store is gone, which ends the process
            self.ask(Ask.STOP)
        with self._changed:
            return self._stops if self._heir is None else self._heir.stop_all()

    def after(self, done: int) -> Ask:
        """The common action after `done` steps; waits if that is being agreed on.

        Raises:
            TransportError: a rank did not answer in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._answered, self._wait_s):
                raise TransportError(
                    f"rank {self._rank}: another rank did not say within {self._wait_s:.0f} s "
                    "which step it is in, to save or stop after the same one"
                )
            step, found = self._agreed
            self._next = done + 1
            if done != step:
                return Ask.NOTHING
            self._agreed, self.last = (0, Ask.NOTHING), self._agreed
            self._changed.notify_all()
            return found

    def release(self) -> None:
        """Let training go on, and agree on nothing more: a rank that is lost will not answer."""
        with self._changed:
            self._is_over, self._answered = True, False
            self._changed.notify_all()

    def close(self, heir: "Agreement | None" = None) -> None:
        """Ranks have left, or came, and make another; this one's thread has ended then.

        What was asked for here and not done, and what will be, `heir` is asked for.

        Raises:
            RuntimeError: the store is gone, or does not answer in time.
        """
        self.release()
        with self._changed:
            pending, number = max(self._wanted, self._agreed[1]), self._round
            self._agreed, self._heir = (0, Ask.NOTHING), heir
        self._store.set(str(number), _OVER)
        self._thread.join(self._wait_s)
        if self._thread.is_alive():
            raise TransportError(
                f"rank {self._rank}: the machine that holds the run's store did not answer within "
                f"{self._wait_s:.0f} s (pipeline.peer_timeout_s)"
            )
        if heir is not None:
            heir.ask(pending)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, which ends the process
            for number in count():
                await_key(self._own, str(number))
                if self._own.get(str(number)).decode() == _OVER or not self._agree(number):
                    return

    def _agree(self, number: int) -> bool:
        """One round; False if this agreement is over before all have answered."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._agreed[1] == Ask.NOTHING)
            if self._is_over:
                return False
            self._answered = True
            answer = json.dumps([self._next, self._wanted])
        self._own.set(f"{number}/{self._rank}", answer)
        keys = [f"{number}/{rank}" for rank in range(self._world)]
        if not self._have_come(keys):
            return False
        steps, asked = zip(*map(json.loads, self._own.multi_get(keys)), strict=True)
        if max(asked) == Ask.STOP:
            self._on_stop(max(steps))
        with self._changed:
            if self._is_over:  # training may have passed that step already
                self._wanted = max(self._wanted, Ask(max(asked)))
                return False
            if max(asked) == Ask.STOP:
                self._stops.set()
            self._answered, self._round = False, number + 1
            self._agreed = (max(steps), Ask(max(asked)))
            again = self._wanted > self._agreed[1]  # asked for after the answer
            self._wanted = self._wanted if again else Ask.NOTHING
            self._changed.notify_all()
        if again:
            self._own.set(str(number + 1), "")
        return True

    def _have_come(self, keys: list[str]) -> bool:
        """Wait for these answers: a wait inside the store would not end with this agreement."""
        pause_s = _FIRST_PAUSE_S
        while not self._own.check(keys):
            with self._changed:
                if self._changed.wait_for(lambda: self._is_over, pause_s):
                    return False
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True
