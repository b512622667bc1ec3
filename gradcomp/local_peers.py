"""Replicas in one process, for experiments and tests: real messages, without a network."""

import queue
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.wire.exchange_header import payload_nbytes
from thinpipe.pipeline.wire.header import DesyncError


@dataclass
class LocalPeers:
    """One of the replicas, which are on threads of their own while they exchange; `exchanges`
    counts how often this one did.
    """

    rank: int
    size: int
    mailboxes: dict[tuple[int, int], "queue.SimpleQueue[Tensor]"]
    timeout_s: float = 60.0
    bytes_sent: int = 0
    exchanges: int = 0

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int
    ) -> dict[int, Tensor]:
        self.exchanges += 1
        for peer, message in outgoing.items():
            self.mailboxes[self.rank, peer].put(message.clone())
            self.bytes_sent += message.numel()
        return {peer: self._receive(peer, capacity) for peer in sources}

    def _receive(self, peer: int, capacity: int) -> Tensor:
        try:
            message = self.mailboxes[peer, self.rank].get(timeout=self.timeout_s)
        except queue.Empty:
            raise TransportError(
                f"replica {peer} -> replica {self.rank}: no message in {self.timeout_s} s"
            ) from None
        if (length := payload_nbytes(message)) > capacity:
            raise DesyncError(
                f"replica {peer} -> replica {self.rank}: a payload of {length} bytes, where at "
                f"most {capacity} can be"
            )
        return message


def local_peers(size: int, *, timeout_s: float = 60.0) -> list[LocalPeers]:
    """Both ends of everything, one element per replica."""
    edges = [(source, target) for source in range(size) for target in range(size)]
    mailboxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
        edge: queue.SimpleQueue() for edge in edges
    }
    return [LocalPeers(rank, size, mailboxes, timeout_s) for rank in range(size)]
