"""How ranks that come later get into a run: what they and its members tell each other in its store.

Those of a whole replica knock together. Member 0 invites them, one replica at a time, and all
members let them in between two steps.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.ranks.store import StoreLog, await_key

_POLL_S, _ANSWER_S = 0.02, 5.0
"""Who does not answer holds up the next so long, and has to knock again."""


class Door:
    """One rank's end of it."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("door", store)
        self._knocks = StoreLog(self._store, "knocks")

    def open(self, first: int) -> None:
        """From here on replicas may come; the ranks of these are numbered from `first` on."""
        self._store.set("first", str(first))

    def numbers(self, count: int) -> list[int]:
        """So many numbers that no other rank has or had; waits until the door is open."""
        first = int(self._store.get("first"))
        end = first + self._store.add("numbers", count)
        return [*range(end - count, end)]  # `add` gives each caller a range of its own

    def knock(self, numbers: Sequence[int]) -> None:
        self._knocks.add([*numbers])

    def knocked(self, number: int) -> list[int]:
        """Who knocked as number so many, from 1; waits for it. Nobody, if it is no list of numbers.

        Raises:
            RuntimeError: the store is gone.
        """
        try:
            numbers = self._knocks.get(number)
        except (ValueError, LookupError, TypeError):
            return []
        whole = isinstance(numbers, list) and all(type(number) is int for number in numbers)
        return numbers if whole else []

    def is_there(self, numbers: Sequence[int], at: Sequence[int]) -> bool:
        """Whether these still wait, and can come to a run that is `at` this point.

        The first of them answers within moments.
        """
        self._store.set(f"asked/{numbers[0]}", json.dumps(at))
        limit_s = time.monotonic() + _ANSWER_S
        while not (there := self._store.check([f"there/{numbers[0]}"])):
            if time.monotonic() > limit_s:
                break
            time.sleep(_POLL_S)
        if not there:
            self._store.set(f"late/{numbers[0]}", "")
        return bool(there)

    def is_late(self, numbers: Sequence[int]) -> bool:
        """Whether these were not there in time, since it was last asked."""
        late = self._store.check([f"late/{numbers[0]}"])
        return bool(late) and bool(self._store.delete_key(f"late/{numbers[0]}"))

    def asked(self, numbers: Sequence[int]) -> list[int]:
        """At which point the run is, if it asks whether these are there; else nothing."""
        return self._said(f"asked/{numbers[0]}")

    def answer(self, numbers: Sequence[int]) -> None:
        self._store.set(f"there/{numbers[0]}", "")

    def begin(self, number: int, numbers: Sequence[int], givers: Sequence[int]) -> None:
        """Have `givers`, which are replica 0, send these their state, as number so many, from 1."""
        self._store.set(f"givers/{numbers[0]}", json.dumps(givers))
        self._store.set(f"begun/{number}", json.dumps(numbers))

    def begun(self, number: int) -> list[int]:
        """Who is to get it; waits for that.

        Raises:
            RuntimeError: the store is gone.
        """
        await_key(self._store, f"begun/{number}")
        return self._said(f"begun/{number}")

    def givers(self, numbers: Sequence[int]) -> list[int]:
        """Who sends it to these; nobody, as long as it is not their turn."""
        return self._said(f"givers/{numbers[0]}")

    def has_sent(self, number: int, place: int) -> None:
        """The rank at this place of replica 0 has sent nearly all, or cannot."""
        self._store.set(f"sent/{number}/{place}", "")

    def have_sent(self, number: int, places: int) -> bool:
        return bool(self._store.check([f"sent/{number}/{place}" for place in range(places)]))

    def serve(self) -> None:
        """Somebody is being served: who waits meanwhile waits on."""
        self._store.add("served", 1)

    def served(self) -> int:
        """Changes as long as anybody is."""
        return self._store.add("served", 0)

    def invite(self, visit: int, numbers: Sequence[int]) -> None:
        """They are to be let in as visit number so many, from 0."""
        self._store.set(f"invited/{visit}", json.dumps(numbers))

    def invited(self, visit: int) -> list[int]:
        """Who is; nobody, as long as nobody is."""
        return self._said(f"invited/{visit}")

    def let_in(self, numbers: Sequence[int], how: dict[str, Any]) -> None:
        """All members are ready for them; `how` says what they go on with."""
        self._store.set(f"in/{numbers[0]}", json.dumps(how))

    def enter(
        self, numbers: Sequence[int], wait_s: float, check: Callable[[], bool]
    ) -> dict[str, Any]:
        """Wait until these are let in, so long after `check` last said that something came.

        It raises if they will not come.

        Raises:
            TimeoutError: they were not in time.
        """
        key, limit_s = f"in/{numbers[0]}", time.monotonic() + wait_s
        while not self._store.check([key]):
            if check():
                limit_s = time.monotonic() + wait_s
            if time.monotonic() > limit_s:
                raise TimeoutError
            time.sleep(_POLL_S)
        how: dict[str, Any] = json.loads(self._store.get(key))
        return how

    def _said(self, key: str) -> list[int]:
        said: list[int] = json.loads(self._store.get(key)) if self._store.check([key]) else []
        return said
