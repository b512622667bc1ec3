"""Replicas in one process: the same messages as between machines, for experiments and tests."""

import queue
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from thinpipe.gradcomp.peers import _payload_nbytes
from thinpipe.pipeline.comm.errors import TransportError


@dataclass
class LocalPeers:
    """Replicas in one process, each on a thread of its own while it exchanges.

    For experiments and tests: the same messages as between processes, without a network.
    """

    rank: int
    size: int
    mailboxes: dict[tuple[int, int], "queue.SimpleQueue[Tensor]"]
    timeout_s: float = 60.0
    bytes_sent: int = 0

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int
    ) -> dict[int, Tensor]:
        """Put the messages in the targets' mailboxes and take those of the sources."""
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
        _payload_nbytes(message, peer, self.rank, capacity)
        return message


def local_peers(size: int, *, timeout_s: float = 60.0) -> list[LocalPeers]:
    """Both ends of everything, one element per replica."""
    edges = [(source, target) for source in range(size) for target in range(size)]
    mailboxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
        edge: queue.SimpleQueue() for edge in edges
    }
    return [LocalPeers(rank, size, mailboxes, timeout_s) for rank in range(size)]
