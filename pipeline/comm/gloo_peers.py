"""Exchanges between ranks over torch process groups (gloo): whole messages, in bounded chunks.

The links are shared with the pipeline, whose messages are on the critical path while an exchange
has a whole step of slack. gloo moves nothing before its receive is posted, so the receiving end
rations: it posts one chunk at a time, from one peer at a time. Hence at most one chunk is on its
way to a rank, and that is all a pipeline message can queue behind; the price is one round trip
per chunk.
"""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.pipeline.comm.gloo_link import irecv, isend, wait
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES, payload_nbytes
from thinpipe.pipeline.wire.header import DesyncError

CHUNK_NBYTES = 256 * 1024


class GlooPeers:
    """The ranks of two groups, which nothing else may use meanwhile.

    Both groups hold all ranks; messages to higher ones travel on the first, those to lower ones on
    the second. With a single one, gloo's own message that a receive is posted would queue behind
    the data that goes the same way, and half of a full-duplex link would be used.
    """

    def __init__(
        self, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], *, chunk_nbytes: int
    ) -> None:
        """All ranks need the same `chunk_nbytes`.

        Raises:
            ValueError: a chunk has no room for a header.
        """
        if chunk_nbytes < EXCHANGE_HEADER_NBYTES:
            raise ValueError(
                f"chunk_nbytes = {chunk_nbytes}: a header takes {EXCHANGE_HEADER_NBYTES}; use at "
                "least that"
            )
        self.rank, self.size = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        self.bytes_sent = 0
        self._groups, self._chunk_nbytes = groups, chunk_nbytes

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int
    ) -> dict[int, Tensor]:
        """Send everything at once; receive in rotation, so that ranks serve different ones."""
        works = []
        for peer in sorted(outgoing, key=lambda peer: (peer - self.rank) % self.size):
            edge = _edge(self.rank, peer)
            for chunk in torch.split(outgoing[peer], self._chunk_nbytes):
                group = self._groups[peer < self.rank]
                works.append((edge, isend(chunk, group, peer, edge=edge)))
        incoming = {
            peer: self._receive(peer, capacity)
            for peer in sorted(sources, key=lambda peer: (self.rank - peer) % self.size)
        }
        for edge, work in works:
            wait(work, edge=edge)
        self.bytes_sent += sum(message.numel() for message in outgoing.values())
        return incoming

    def _receive(self, peer: int, capacity: int) -> Tensor:
        chunk = self._take(peer)
        length = payload_nbytes(chunk)
        if length > capacity:
            raise DesyncError(
                f"replica {peer} -> replica {self.rank}: a payload of {length} bytes, where at "
                f"most {capacity} can be; the two replicas are at different exchanges"
            )
        length += EXCHANGE_HEADER_NBYTES
        message = torch.empty(length, dtype=torch.uint8)
        done = 0
        while True:
            part = min(self._chunk_nbytes, length - done)
            message[done : done + part] = chunk[:part]
            done += part
            if done == length:
                return message
            chunk = self._take(peer)

    def _take(self, peer: int) -> Tensor:
        """A chunk, in a buffer as long as any can be: gloo ends a process that is sent more."""
        buffer = torch.empty(self._chunk_nbytes, dtype=torch.uint8)
        edge = _edge(peer, self.rank)
        wait(irecv(buffer, self._groups[self.rank < peer], peer, edge=edge), edge=edge)
        return buffer


def _edge(source: int, target: int) -> str:
    return f"replica {source} -> replica {target}: lost in an exchange"
