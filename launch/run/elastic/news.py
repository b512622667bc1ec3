"""What a rank hears of ranks that are lost.

It comes through the run's store: from the supervisor of the process that was killed, from others if
a whole machine is gone (`hosts.py`), from a rank that leaves. A thread then breaks this rank's
connections, which wakes up whatever waits for a peer. A *doubt* does so too: somebody has waited
too long for one of a generation, and nobody knows yet whether that one is lost.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from itertools import count

from torch.distributed.distributed_c10d import Store

from thinpipe.launch.net.ranks.failures import Losses, doubted
from thinpipe.launch.net.ranks.gloo_backend import break_connections
from thinpipe.pipeline.comm.abandoned import abandon_if

_NOTICE_S, SOON_S = 10.0, 1.0
"""From a broken connection to the news of who was lost, at most and mostly: a supervisor takes some
0.1 s."""


class News:
    """Of the `members` of a `generation`, which change."""

    def __init__(self, members: list[int], generation: int, ports: Collection[int]) -> None:
        """`ports` are those at which members listen; there may come more."""
        self.members, self.generation, self._ports = members, generation, ports
        self.lost: dict[int, str] = {}
        self.changed = threading.Condition()
        """Held while anything here changes, and told of it."""
        self._doubted: int | None = None  # the last generation in which one was silent
        abandon_if(self.is_broken)

    def follow(
        self, store: Store, on_loss: Callable[[], None], on_other: Callable[[int], None]
    ) -> None:
        """Hear of losses, in a thread, whose own this `store` of the run is.

        `on_loss` follows each that breaks connections, `on_other` each of a rank that is no member.
        """
        arguments = (Losses(store), on_loss, on_other)
        threading.Thread(target=self._follow, args=arguments, daemon=True).start()

    def lost_of(self, members: Sequence[int]) -> str:
        """Why these of them were lost who are, in words."""
        return "; ".join(self.lost[member] for member in members if member in self.lost)

    def is_broken(self) -> bool:
        """Whether this generation's connections are."""
        return self.is_incomplete() or self._doubted == self.generation

    def is_incomplete(self) -> bool:
        """Whether a member is lost."""
        return any(member in self.lost for member in self.members)

    def hears(self, news: Callable[[], bool], wait_s: float | None = None) -> bool:
        """Wait until that is so, but no longer than news take."""
        with self.changed:
            return self.changed.wait_for(news, _NOTICE_S if wait_s is None else wait_s)

    def tell(self) -> None:
        """Something that others wait for has changed."""
        with self.changed:
            self.changed.notify_all()

    def break_if_incomplete(self) -> bool:
        """Break what was connected since a member was lost; whether one was."""
        with self.changed:
            if incomplete := self.is_incomplete():
                break_connections(self._ports)
            return incomplete

    def _follow(
        self, losses: Losses, on_loss: Callable[[], None], on_other: Callable[[int], None]
    ) -> None:
        for number in count(1):
            try:
                rank, message = losses.wait(number)
            except RuntimeError:  # the store is gone, which ends the process
                return
            with self.changed:
                if rank in self.lost:  # two have said it
                    continue
                # else the next generation is there already
                is_news = rank in self.members or rank == doubted(self.generation)
                if rank >= 0:
                    self.lost[rank] = message
                elif is_news:
                    self._doubted = doubted(rank)  # the generation: it is its own inverse
                # under the lock, or a generation that forms meanwhile would lose its connections
                if is_news:
                    break_connections(self._ports)
                self.changed.notify_all()
            if is_news:
                on_loss()
            elif rank >= 0:
                on_other(rank)
