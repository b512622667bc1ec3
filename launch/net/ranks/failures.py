"""The first failure of a run: every rank learns of it within moments."""

import signal
import threading
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.host.terminal import end_now
from thinpipe.launch.net.ranks.store import StoreLog

_GRACE_S, _CAUSE_S = 1.0, 5.0
"""How long to wait for more, and at most for a cause: a connection that broke is noticed before."""
_OWN_ACCOUNT_S = 0.2  # how long the main thread may take to say more, if it has noticed too
_STUCK_S = 10.0  # a main thread inside gloo may never return
_SETTLE_S = 140.0
"""Beyond the time that ranks wait for each other: they notice a loss first, and end what they
encode (`gradcomp/overlap.py`)."""
LOST, OUT = 75, 76
"""Exit codes of a rank that is well, but that the others go on without; `OUT` if that is so of all
ranks of its machine, which then need not wait for the end of the run.
"""


class Failures:
    """The failures of a run, in its store, in the order in which they were reported."""

    def __init__(self, store: Store, who: str) -> None:
        self._log, self._who = StoreLog(store, "failures"), who
        self._known: list[Any] = []

    def report(self, message: str, *, cause: bool) -> None:
        """Publish what failed here. A connection that broke is seldom the cause, an error is."""
        self._log.add([not cause, self._who, message])

    def first(self, since_s: float, ended: Callable[[], bool]) -> str:
        """The first cause, or else the first failure, and whose it is.

        Waits for a cause since `since_s`, when this rank learnt of a failure (monotonic); no longer
        if `ended()` says that this machine's launcher ends its ranks: what it found killed it
        reports when they are gone. RuntimeError if the store is gone.
        """
        time.sleep(max(0.0, since_s + _GRACE_S - time.monotonic()))
        limit_s = since_s + _CAUSE_S
        while not (self._found()[0] or ended()) and time.monotonic() < limit_s:
            time.sleep(0.05)
        return self.known() or "nothing was reported"

    def known(self) -> str | None:
        """The same as far as it was reported by now."""
        return self._found()[1]

    def _found(self) -> tuple[bool, str | None]:
        while self._log.has(len(self._known) + 1):
            self._known.append(self._log.get(len(self._known) + 1))
        if not self._known:
            return False, None
        no_cause, who, message = min(self._known, key=itemgetter(0))  # the first of them
        return not no_cause, f"{who}: {message}"

    def wait(self) -> None:
        """Wait for a failure; RuntimeError if the store is gone."""
        self._log.get(1)


def doubted(generation: int) -> int:
    """What `Losses.wait` gives in place of a rank if one of a generation, from 0, is silent."""
    return -2 - generation


class Losses:
    """Ranks that were lost, in the run's store, and whether the others go on without them."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("losses", store)
        self._log = StoreLog(self._store, "log")

    def open(self, wait_s: float) -> None:
        """From here on the run may go on; its ranks wait `wait_s` seconds for each other."""
        self._store.set("open", str(wait_s))

    def close(self) -> None:
        """All is done that ranks do together: who is lost from here on is missed by none."""
        self._store.set("closed", "")

    @property
    def is_open(self) -> bool:
        return bool(self._store.check(["open"])) and not self._store.check(["closed"])

    def report(self, rank: int, message: str) -> None:
        """Publish what ended a rank, unless that is known; two at a time may both do so."""
        if not self.has(rank):
            self._log.add([rank, message])
            self._store.set(f"reported/{rank}", "")

    def doubt(self, generation: int) -> None:
        """Say that a rank of a generation is silent; who is waiting need not wait any longer."""
        self.report(doubted(generation), "")

    def has(self, rank: int) -> bool:
        return bool(self._store.check([f"reported/{rank}"]))

    def wait(self, number: int) -> tuple[int, str]:
        """The rank that was lost as number so many, from 1, and what ended it; waits for it."""
        rank, message = self._log.get(number)
        return int(rank), str(message)

    def settle(self, rank: int, *, goes_on: bool, out: bool = False) -> None:
        """Say whether the others go on without a rank, and if without all those of its machine."""
        code = 0 if not goes_on else OUT if out else LOST
        self._store.set(f"settled/{rank}", str(code))

    def settled(self, rank: int, has_failed: Callable[[], bool]) -> int:
        """`LOST` or `OUT` if they do; waits until it is known, the run `has_failed`, or nobody can
        say it.
        """
        key = f"settled/{rank}"
        limit_s = time.monotonic() + float(self._store.get("open")) + _SETTLE_S
        while self.is_open and not self._store.check([key]) and time.monotonic() < limit_s:
            if has_failed():
                break
            time.sleep(0.05)
        return int(self._store.get(key)) if self._store.check([key]) else 0


class Watch:
    """Ends this process when another rank fails, wherever it waits meanwhile.

    `failures` must have a store connection of its own: it is blocked all the time. `describe` says
    what this host knows of the connections to others; `ended` as in `Failures.first`.
    """

    def __init__(
        self, failures: Failures, who: str, describe: Callable[[], str], ended: Callable[[], bool]
    ) -> None:
        self._failures, self._who, self._describe = failures, who, describe
        self._ended = ended
        self._handled = threading.Event()
        self._noticed_s: float | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def stand_down(self) -> float:
        """This rank reports a failure itself, or none; return when the first was known, or now."""
        self._handled.set()
        return time.monotonic() if self._noticed_s is None else self._noticed_s

    def _run(self) -> None:
        try:
            self._failures.wait()
            self._noticed_s = time.monotonic()
            first = self._failures.first(self._noticed_s, self._ended)
            account = f"ended because of another rank: {first}"
        except RuntimeError:
            account = "the machine that holds the run's store is gone"
            time.sleep(_GRACE_S)
        if self._handled.wait(_OWN_ACCOUNT_S):
            return
        end_now(1, f"{self._who}: {account}{self._describe()}")


def end_soon() -> None:
    """End this process in ten seconds, even if its main thread hangs."""
    timer = threading.Timer(_STUCK_S, lambda: end_now(1))
    timer.daemon = True
    timer.start()


def death_by(number: int, *, out_of_memory: bool) -> str:
    """A signal that ended a rank, in words."""
    text = f"killed by signal {number} ({signal.Signals(number).name})"
    if number != signal.SIGKILL:
        return text
    doubt = "" if out_of_memory else "if nobody did that, "
    return f"{text}: {doubt}this machine ran out of memory (dmesg shows it)"
