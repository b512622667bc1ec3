"""Exchanges between ranks over torch process groups (gloo): a header, then the payload.

The links are shared with the pipeline, whose messages are on the critical path while an exchange
has a whole step of slack. The network lets them overtake (`launch/net/overlay`).
"""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.pipeline.comm.gloo_link import irecv, isend, wait
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES, payload_nbytes
from thinpipe.pipeline.wire.header import DesyncError


class GlooPeers:
    """The ranks of two groups, which nothing else may use meanwhile.

    Both groups hold all ranks; messages to higher ones travel on the first, those to lower ones on
    the second. With a single one, gloo's own message that a receive is posted would queue behind
    the data that goes the same way, and half of a full-duplex link would be used.
    """

    def __init__(
        self, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], what: str = "replica"
    ) -> None:
        """`what` errors call each of the ranks."""
        self._what = what
        self.bytes_sent = 0
        self.reset(groups)

    def reset(self, groups: tuple[dist.ProcessGroup, dist.ProcessGroup]) -> None:
        self.rank, self.size = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        self._groups = groups

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int
    ) -> dict[int, Tensor]:
        """Send and receive everything at once; a payload's receive is posted when its length is
        known, as gloo ends a process that is sent more.
        """
        headers = {}
        for peer in sorted(sources):
            header = torch.empty(EXCHANGE_HEADER_NBYTES, dtype=torch.uint8)
            headers[peer] = (self._receive(header, peer), header)
        works = []
        for peer in sorted(outgoing, key=lambda peer: (peer - self.rank) % self.size):
            edge, group = self._edge(self.rank, peer), self._groups[peer < self.rank]
            message = outgoing[peer]
            for part in (message[:EXCHANGE_HEADER_NBYTES], message[EXCHANGE_HEADER_NBYTES:]):
                works.append((edge, isend(part, group, peer, edge=edge)))
        incoming = {}
        for peer, (work, header) in headers.items():
            edge = self._edge(peer, self.rank)
            wait(work, edge=edge)
            incoming[peer] = self._message(header, peer, capacity)
            payload = incoming[peer][EXCHANGE_HEADER_NBYTES:]
            works.append((edge, self._receive(payload, peer)))
        for edge, work in works:
            wait(work, edge=edge)
        self.bytes_sent += sum(message.numel() for message in outgoing.values())
        return incoming

    def _receive(self, buffer: Tensor, peer: int) -> dist.Work:
        return irecv(buffer, self._groups[self.rank < peer], peer, edge=self._edge(peer, self.rank))

    def _message(self, header: Tensor, peer: int, capacity: int) -> Tensor:
        length = payload_nbytes(header)
        if length > capacity:
            raise DesyncError(
                f"{self._what} {peer} -> {self._what} {self.rank}: a payload of {length} bytes, "
                f"where at most {capacity} can be; the two {self._what}s are at different exchanges"
            )
        message = torch.empty(EXCHANGE_HEADER_NBYTES + length, dtype=torch.uint8)
        message[:EXCHANGE_HEADER_NBYTES] = header
        return message

    def _edge(self, source: int, target: int) -> str:
        return f"{self._what} {source} -> {self._what} {target}: lost in an exchange"
