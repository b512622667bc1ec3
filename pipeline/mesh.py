"""Ranks as replicas x pipeline positions, and the process groups between them.

rank = replica * pipeline_ranks + position. Forward and backward messages of a pipeline travel on
groups of their own, so that neither waits behind the other; so do control scalars and, from a
thread of its own, the exchange between replicas.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.link import transport_reason

_SWAP_TAG = (1 << 31) - 1  # above every tag of `thinpipe.pipeline.comm.link`


@dataclass(frozen=True)
class Mesh:
    """This process's place and groups.

    `replicas_group` and the two of `exchange` join the same position of all replicas: one for
    scalars, two for the communication thread (to higher and to lower replicas).
    """

    pipeline_ranks: int
    replicas: int
    rank: int
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    control: dist.ProcessGroup
    replicas_group: dist.ProcessGroup
    exchange: tuple[dist.ProcessGroup, dist.ProcessGroup]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pipeline_ranks * self.replicas

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to."""
        return self.rank // self.pipeline_ranks

    @property
    def position(self) -> int:
        """Rank within its pipeline."""
        return self.rank % self.pipeline_ranks

    def share(self, values: Tensor) -> Tensor:
        """All ranks' float64 vectors [world, n], in one hop: every rank sends to every other.

        gloo's all-gather is a ring of world - 1 hops, each with the link's delay.
        """
        out_WN = torch.empty(self.world_size, len(values), dtype=torch.float64)
        out_WN[self.rank] = values
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        works = [
            (peer, dist.irecv(out_WN[peer], group=self.control, group_src=peer)) for peer in peers
        ]
        works += [(peer, dist.isend(values, group=self.control, group_dst=peer)) for peer in peers]
        for peer, work in works:
            assert work is not None
            try:
                work.wait()
            except RuntimeError as error:
                raise TransportError(
                    f"rank {self.rank} lost rank {peer} in the exchange that ends a step: "
                    f"{transport_reason(error)}"
                ) from error
        return out_WN

    def shared_nbytes(self, all_WN: Tensor) -> int:
        """Bytes that all ranks together sent for what `share` returned."""
        return all_WN.nbytes * (self.world_size - 1)

    def swap(self, mine: Tensor, theirs: Tensor, peer: int) -> None:
        """Exchange equal-sized tensors with another position of this pipeline."""
        receive = dist.irecv(theirs, group=self.forward, group_src=peer, tag=_SWAP_TAG)
        send = dist.isend(mine, group=self.forward, group_dst=peer, tag=_SWAP_TAG)
        assert receive is not None
        assert send is not None
        receive.wait()
        send.wait()


def build_mesh(pipeline_ranks: int, replicas: int, *, timeout_s: float) -> Mesh:
    """Create the groups; every rank of the world calls it, in the same order.

    Raises:
        ValueError: the world has not pipeline_ranks * replicas ranks.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world != pipeline_ranks * replicas:
        raise ValueError(
            f"{world} processes were started, but {pipeline_ranks} pipeline ranks x {replicas} "
            f"replicas need {pipeline_ranks * replicas}; start that many"
        )
    pipelines = [[r * pipeline_ranks + p for p in range(pipeline_ranks)] for r in range(replicas)]
    columns = [list(ranks) for ranks in zip(*pipelines, strict=True)]
    return Mesh(
        pipeline_ranks,
        replicas,
        rank,
        forward=_own_group(pipelines, timeout_s),
        backward=_own_group(pipelines, timeout_s),
        control=_own_group([list(range(world))], timeout_s),
        replicas_group=_own_group(columns, timeout_s),
        exchange=(_own_group(columns, timeout_s), _own_group(columns, timeout_s)),
    )


def _own_group(partition: list[list[int]], timeout_s: float) -> dist.ProcessGroup:
    """Create a group for every part; return the one this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        partition, timeout=timedelta(seconds=timeout_s), backend="gloo"
    )
    assert isinstance(group, dist.ProcessGroup)
    return group
