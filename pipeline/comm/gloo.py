"""The Transport over torch process groups (gloo): a group per kind of traffic.

Forward and backward messages of a pipeline travel on groups of their own, so that neither waits
behind the other; so do control vectors, and exchanges between replicas.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo_link import GlooLink, Naming, irecv, isend, wait
from thinpipe.pipeline.comm.transport import CPU, FIRST_CUT, LANES, TIED, WEIGHTS, Scope
from thinpipe.pipeline.mesh import Mesh, check_world
from thinpipe.pipeline.wire.checksum import CHECKSUM_NBYTES, digest_of, opened, sealed
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES, payload_nbytes
from thinpipe.pipeline.wire.header import DesyncError

Traffic = Literal["control", "pipeline", "exchange"]
"""What a group carries, for a backend that tells them apart (`launch/net/ranks/gloo_backend.py`);
torch's own takes no notice."""


class GlooTransport:
    """Everything that leaves this rank, over groups made from the default one."""

    def __init__(
        self, pipeline_ranks: int, replicas: int, *, timeout_s: float, shards: int = 1
    ) -> None:
        """Make the groups; every rank of the world calls it."""
        self._timeout_s = timeout_s
        self._links: list[GlooLink] = []
        self._peers: list[tuple[Scope, GlooPeers]] = []
        self._stands_in = False
        self._make_groups(pipeline_ranks, replicas, shards)

    def stand_in(self, pipeline_ranks: int, place: int) -> None:
        """Be at this place of a pipeline without replicas: what there is to share stays here.

        The others are reached after `regroup`.
        """
        own = self._group([dist.get_rank()], "control")
        self.pipeline_group = self._backward = self.shard_group = self._control = own
        self.mesh, self._stands_in = Mesh(pipeline_ranks, 1, place), True

    def regroup(self, replicas: int) -> None:
        """Go on in torch's new default group, with links and peers as they were handed out.

        It has so many replicas, and this rank keeps its place in its own. What was under way is
        forgotten; every rank of the new group calls it.
        """
        before, self._stands_in = self.mesh, False
        self._make_groups(before.pipeline_ranks, replicas, before.shards)
        for link in self._links:  # whose ends keep their places in the pipeline
            link.reset(self._group_of(link.channel))
        # not every rank has made those of the world, and who needs them makes them anew
        self._peers = [(scope, peers) for scope, peers in self._peers if scope != "world"]
        for scope, peers in self._peers:
            peers.reset(self._two_groups(scope))

    def _make_groups(self, pipeline_ranks: int, replicas: int, shards: int) -> None:
        check_world(pipeline_ranks, replicas, dist.get_world_size(), shards=shards)
        self.mesh = Mesh(pipeline_ranks, replicas, dist.get_rank(), shards)
        self.pipeline_group = self._group(self.mesh.pipeline, "pipeline")
        self._backward = self.pipeline_group
        if pipeline_ranks > 1:
            self._backward = self._group(self.mesh.pipeline, "pipeline")
        self.shard_group = self.pipeline_group
        if shards > 1:
            self.shard_group = self._group(self.mesh.stage_shards, "exchange")
        self._control = self._group(range(self.mesh.world_size), "control")
        self._numbers = [0] * self.mesh.world_size
        """Of the next control message to and from each rank."""
        self._agreed: dict[Scope, float] = {}  # a digest of all vectors shared so far

    def link(self, peer: int, channel: int, name: str, *, device: torch.device = CPU) -> GlooLink:
        """Cuts use groups of their own, one per direction."""
        to = peer if channel < FIRST_CUT else self.mesh.pipeline.index(peer)
        link = GlooLink(self._group_of(channel), to, channel, name, device)
        if channel >= FIRST_CUT or TIED <= channel < WEIGHTS:  # others are for once
            self._links.append(link)
        return link

    def _group_of(self, channel: int) -> dist.ProcessGroup:
        if channel < FIRST_CUT:
            return self._control
        return self._backward if channel % 2 else self.pipeline_group

    def peers(self, scope: Scope, what: str = "replica") -> "GlooPeers":
        peers = GlooPeers(self._two_groups(scope), what)
        self._peers.append((scope, peers))
        return peers

    def _two_groups(self, scope: Scope) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if self._stands_in:
            return self._control, self._control
        ranks = sorted(self._ranks(scope))
        return self._group(ranks, "exchange"), self._group(ranks, "exchange")

    def share(self, values: Tensor, scope: Scope) -> Tensor:
        """Every rank sends to every other: gloo's all-gather is a ring of hops, each delayed.

        With its vector each sends a digest of all those before, which proves them equal.
        """
        ranks, digest = self._ranks(scope), self._agreed.get(scope, 0.0)
        mine = torch.cat([values.to(torch.float64), torch.tensor([digest], dtype=torch.float64)])
        found = self._swap(mine.view(torch.uint8), ranks, [8 * len(mine)] * len(ranks))
        all_RN = torch.stack([row.view(torch.float64) for row in found])
        for rank, other in zip(ranks, all_RN[:, -1].tolist(), strict=True):
            if other != digest:
                raise DesyncError(
                    f"rank {rank} and rank {self.mesh.rank} had different totals in an exchange "
                    "that all ranks should have agreed in; start again from a checkpoint (--resume)"
                )
        self._agreed[scope] = digest_of(all_RN)
        return all_RN[:, :-1]

    def gather(self, data: bytes) -> list[bytes]:
        mine = torch.empty(0, dtype=torch.uint8)
        if data:
            mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        lengths = self.share(torch.tensor([len(data)], dtype=torch.float64), "world")
        ranks = self._ranks("world")
        found = self._swap(mine, ranks, lengths[:, 0].to(torch.int64).tolist())
        by_rank = dict(zip(ranks, found, strict=True))
        return [by_rank[rank].numpy().tobytes() for rank in sorted(by_rank)]

    def close(self) -> None:
        """Nobody leaves while another still needs its links."""
        self.share(torch.zeros(0, dtype=torch.float64), "world")

    def _swap(self, mine: Tensor, ranks: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
        me, works = self.mesh.rank, []
        buffers = {
            peer: torch.empty(length + CHECKSUM_NBYTES, dtype=torch.uint8)
            for peer, length in zip(ranks, lengths, strict=True)
            if peer != me
        }
        for peer, buffer in buffers.items():
            edge = self._edge(peer, me)
            works.append((edge, irecv(buffer, self._control, peer, edge=edge)))
        for peer in buffers:
            edge, message = self._edge(me, peer), sealed(mine, self._numbers[peer])
            works.append((edge, isend(message, self._control, peer, edge=edge)))
        for edge, work in works:
            wait(work, edge=edge)
        return [mine if peer == me else self._opened(buffers[peer], peer) for peer in ranks]

    def _opened(self, message: Tensor, peer: int) -> Tensor:
        number, self._numbers[peer] = self._numbers[peer], self._numbers[peer] + 1
        data = opened(message, number)
        if data is None:
            raise TransportError(
                f"{self._edge(peer, self.mesh.rank)}: message {number} is damaged or not the next"
            )
        return data

    def _ranks(self, scope: Scope) -> Sequence[int]:
        mesh = self.mesh
        if self._stands_in:
            return [mesh.rank]
        return {
            "pipeline": mesh.pipeline,
            "replica": mesh.whole_replica,
            "shards": mesh.stage_shards,
            "stage": mesh.all_at_position,
            "copies": mesh.same_stage,
            "world": mesh.world,
        }[scope]

    @staticmethod
    def _edge(source: int, target: int) -> str:
        return f"rank {source} -> rank {target}: lost in an exchange of control messages"

    def _group(self, ranks: Sequence[int], traffic: Traffic) -> dist.ProcessGroup:
        with Naming(f"ranks {list(ranks)}: connecting failed"):
            group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=self._timeout_s),
                pg_options=traffic,
                use_local_synchronization=True,
            )
        assert isinstance(group, dist.ProcessGroup)
        return group


_CAPACITY, _HEADER, _PAYLOAD = 8, 16, 16 + EXCHANGE_HEADER_NBYTES
"""Where each begins in a buffer; kernels may want the payload aligned."""
_LARGEST_TAG = 2**31 - 1


@dataclass(frozen=True)
class _Expected:
    """A message that is received into `buffer` in two parts: all before the payload, and that."""

    buffer: Tensor
    start: dist.Work
    payload: dist.Work


def _tag(lane: int, capacity: int) -> int:
    """Of a payload; below `LANES` are those of what comes before it."""
    return LANES * (1 + capacity % (_LARGEST_TAG // LANES)) + lane


class GlooPeers:
    """The ranks of two groups, which nothing else may use meanwhile; a lane is a tag in both.

    Both groups hold all ranks; messages to higher ones travel on the first, those to lower ones on
    the second. With a single one, gloo's own message that a receive is posted would queue behind
    the data that goes the same way, and half of a full-duplex link would be used.

    After an exchange that failed only `reset` makes it usable again: receives of others are posted.
    """

    def __init__(
        self, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], what: str = "replica"
    ) -> None:
        self._what = what
        self.bytes_sent = 0
        self._counting = threading.Lock()
        self.reset(groups)

    def reset(self, groups: tuple[dist.ProcessGroup, dist.ProcessGroup]) -> None:
        self.rank, self.size = dist.get_rank(groups[0]), dist.get_world_size(groups[0])
        self._groups = groups
        self._expected = defaultdict[tuple[int, int], deque[_Expected]](deque)
        """By source and lane."""

    def expect(self, sources: Collection[int], capacity: int, lane: int = 0) -> None:
        for peer in sorted(sources):
            buffer = torch.empty(_PAYLOAD + capacity, dtype=torch.uint8)
            start = self._receive(buffer[_CAPACITY:_PAYLOAD], peer, lane)
            payload = self._receive(buffer[_PAYLOAD:], peer, _tag(lane, capacity))
            self._expected[peer, lane].append(_Expected(buffer, start, payload))

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int, lane: int = 0
    ) -> dict[int, Tensor]:
        """Send and receive everything at once.

        gloo ends a process that is sent more than the receive it posted holds. So payloads have
        tags by capacity, and what comes before one tells whether its tag is the same here.
        """
        unexpected = [peer for peer in sources if not self._expected[peer, lane]]
        self.expect(unexpected, capacity, lane)
        starts, payloads = [], []
        for peer in sorted(outgoing, key=lambda peer: (peer - self.rank) % self.size):
            header, payload = outgoing[peer].tensor_split([EXCHANGE_HEADER_NBYTES])
            longest = max(capacity, payload.numel())  # the peer rejects what is longer
            start = torch.cat([torch.tensor([longest]).view(torch.uint8), header])
            starts.append(self._send(start, peer, lane))
            payloads.append(self._send(payload, peer, _tag(lane, longest)))
        for edge, work in starts:  # first: who rejects a message must have told the others
            wait(work, edge=edge)
        incoming = {peer: self._message(peer, capacity, lane) for peer in sorted(sources)}
        for edge, work in payloads:
            wait(work, edge=edge)
        with self._counting:
            self.bytes_sent += sum(message.numel() for message in outgoing.values())
        return incoming

    def _send(self, part: Tensor, peer: int, tag: int) -> tuple[str, dist.Work]:
        edge = self._edge(self.rank, peer)
        return edge, isend(part, self._groups[peer < self.rank], peer, edge=edge, tag=tag)

    def _receive(self, buffer: Tensor, peer: int, tag: int) -> dist.Work:
        edge = self._edge(peer, self.rank)
        return irecv(buffer, self._groups[self.rank < peer], peer, edge=edge, tag=tag)

    def _message(self, peer: int, capacity: int, lane: int) -> Tensor:
        edge, expected = self._edge(peer, self.rank), self._expected[peer, lane].popleft()
        assert expected.buffer.numel() == _PAYLOAD + capacity, "expected with another capacity"
        wait(expected.start, edge=edge)
        message = expected.buffer[_HEADER:]
        theirs = int(expected.buffer[_CAPACITY:_HEADER].view(torch.int64))
        length = payload_nbytes(message)
        if theirs != capacity or length > capacity:
            raise DesyncError(
                f"{self._what} {peer} -> {self._what} {self.rank}: a payload of up to "
                f"{max(theirs, length)} bytes, where at most {capacity} can be; the two "
                f"{self._what}s are at different exchanges"
            )
        wait(expected.payload, edge=edge)
        return message[: EXCHANGE_HEADER_NBYTES + length]

    def _edge(self, source: int, target: int) -> str:
        return f"{self._what} {source} -> {self._what} {target}: lost in an exchange"
