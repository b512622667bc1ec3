"""Replicas in one process, for experiments and tests: real messages, without a network."""

import queue
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import product

from torch import Tensor

from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.transport import LANES
from thinpipe.pipeline.wire.exchange_header import payload_nbytes
from thinpipe.pipeline.wire.header import DesyncError


@dataclass
class LocalPeers:
    """One of the replicas, which are on threads of their own while they exchange; `exchanges`
    counts how often this one did.
    """

    rank: int
    size: int
    mailboxes: dict[tuple[int, int, int], "queue.SimpleQueue[tuple[int, Tensor]]"]
    """By source, target and lane: messages, and what their senders take for the capacity."""
    timeout_s: float = 60.0
    bytes_sent: int = 0
    exchanges: int = 0
    _counting: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, sources: Collection[int], capacity: int, lane: int = 0) -> None:
        """Mailboxes always are."""

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int, lane: int = 0
    ) -> dict[int, Tensor]:
        with self._counting:
            self.exchanges += 1
            self.bytes_sent += sum(message.numel() for message in outgoing.values())
        for peer, message in outgoing.items():
            longest = max(capacity, payload_nbytes(message))
            self.mailboxes[self.rank, peer, lane].put((longest, message.clone()))
        return {peer: self._receive(peer, capacity, lane) for peer in sources}

    def _receive(self, peer: int, capacity: int, lane: int) -> Tensor:
        theirs, message = self._take(peer, lane)
        if theirs != capacity:
            raise DesyncError(
                f"replica {peer} -> replica {self.rank}: a payload of up to {theirs} bytes, where "
                f"at most {capacity} can be"
            )
        return message

    def _take(self, peer: int, lane: int) -> tuple[int, Tensor]:
        try:
            return self.mailboxes[peer, self.rank, lane].get(timeout=self.timeout_s)
        except queue.Empty:
            raise TransportError(
                f"replica {peer} -> replica {self.rank}: no message in {self.timeout_s} s"
            ) from None


def local_peers(size: int, *, timeout_s: float = 60.0) -> list[LocalPeers]:
    """Both ends of everything, one element per replica."""
    mailboxes: dict[tuple[int, int, int], queue.SimpleQueue[tuple[int, Tensor]]] = {
        edge: queue.SimpleQueue() for edge in product(range(size), range(size), range(LANES))
    }
    return [LocalPeers(rank, size, mailboxes, timeout_s) for rank in range(size)]
