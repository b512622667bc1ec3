"""How the replicas of a stage reach each other: whole messages, moved in bounded chunks.

Messages start with the header of `pipeline/wire/header.py`, which says how long they are. The links
are shared with the pipeline, whose messages are on the critical path while an exchange has a whole
step of slack. gloo moves nothing before its receive is posted, so the receiving end rations: it
posts one chunk at a time, from one peer at a time. Hence at most one chunk is under way to a
replica, and that is all a pipeline message can find ahead of it; the price is one round trip per
chunk.
"""

import re
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.wire.header import HEADER_NBYTES, DesyncError, coding_and_length

CHUNK_NBYTES = 256 * 1024


Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


class GroupPeers:
    """The ranks of two process groups (gloo), which nothing else may use meanwhile.

    Both groups hold all replicas; messages to higher ranks travel on the first, those to lower
    ranks on the second. With a single one, the word that a receive is posted would queue behind
    the data that goes the same way, and a full-duplex link would be used by half.
    """

    def __init__(self, groups: Groups, *, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        """All replicas need the same `chunk_nbytes`.

        Raises:
            ValueError: a chunk has no room for a header.
        """
        if chunk_nbytes < HEADER_NBYTES:
            raise ValueError(
                f"chunk_nbytes = {chunk_nbytes}: a header takes {HEADER_NBYTES}; use at least that"
            )
        self.rank, self.size = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        self.bytes_sent = 0
        self._groups, self._chunk_nbytes = groups, chunk_nbytes

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int
    ) -> dict[int, Tensor]:
        """Send everything at once; receive in rotation, so that replicas serve different ones."""
        works = []
        for peer in sorted(outgoing, key=lambda peer: (peer - self.rank) % self.size):
            chunks = torch.split(outgoing[peer], self._chunk_nbytes)
            works += [(peer, self._send(peer, chunk)) for chunk in chunks]
        incoming = {}
        for peer in sorted(sources, key=lambda peer: (self.rank - peer) % self.size):
            incoming[peer] = self._receive(peer, capacity)
        for peer, work in works:
            self._wait(work, self.rank, peer)
        self.bytes_sent += sum(message.numel() for message in outgoing.values())
        return incoming

    def _send(self, peer: int, chunk: Tensor) -> dist.Work:
        try:
            work = dist.isend(chunk, group=self._groups[peer < self.rank], group_dst=peer)
        except RuntimeError as error:
            raise _lost(self.rank, peer, error) from error
        assert work is not None
        return work

    def _receive(self, peer: int, capacity: int) -> Tensor:
        chunk = self._take(peer)
        length = HEADER_NBYTES + _payload_nbytes(chunk, peer, self.rank, capacity)
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
        try:
            work = dist.irecv(buffer, group=self._groups[self.rank < peer], group_src=peer)
        except RuntimeError as error:
            raise _lost(peer, self.rank, error) from error
        assert work is not None
        self._wait(work, peer, self.rank)
        return buffer

    @staticmethod
    def _wait(work: dist.Work, source: int, target: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(source, target, error) from error


def _payload_nbytes(start: Tensor, source: int, target: int, capacity: int) -> int:
    length = coding_and_length(start)[1]
    if length > capacity:
        raise DesyncError(
            f"replica {source} -> replica {target}: a payload of {length} bytes, where at most "
            f"{capacity} can be; the two replicas are not at the same place"
        )
    return length


def _lost(source: int, target: int, error: RuntimeError) -> TransportError:
    # gloo's first sentence, without the key in its source and its advice
    reason = re.sub(r"^\[[^]]*:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]
    return TransportError(f"replica {source} -> replica {target}: lost in an exchange: {reason}")
