"""What replicas exchange in tests, over any kind of `Peers`, and what they must find."""

import torch
from torch import Tensor

from thinpipe.gradcomp.exchange import ExchangeKey, gather_bytes, gather_sum, sum_sharded
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES, ExchangeHeader

EXACT = Cast("fp32")


def message(nbytes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    length = EXCHANGE_HEADER_NBYTES + nbytes
    whole = torch.randint(256, (length,), generator=generator).to(torch.uint8)
    ExchangeHeader(0, 1, 32, 0, 0, 0).write(whole)
    return whole


def vector(rank: int) -> Tensor:
    """A replica's 100 values, which no two servers can share evenly among three."""
    return torch.randn(100, generator=torch.Generator().manual_seed(rank))


def total(size: int) -> Tensor:
    """The sum over the replicas, in their order."""
    return sum(map(vector, range(size)), torch.zeros(100))


def sharded(peers: Peers, step: int = 0) -> Tensor:
    """The sum, each shard made by its server."""
    return sum_sharded(peers, ExchangeKey(step, 0), vector(peers.rank), codec=EXACT)


def summed(peers: Peers) -> Tensor:
    return gather_sum(peers, ExchangeKey(1, 0), vector(peers.rank), codec=EXACT)[0]


def gathered(peers: Peers) -> list[Tensor]:
    mine, key = vector(peers.rank), ExchangeKey(2, 0)
    payloads = gather_bytes(peers, key, mine, torch.empty_like(mine), codec=EXACT)
    return [payload.view(torch.float32) for payload in payloads]


def along_ring(peers: Peers) -> dict[int, Tensor]:
    """Pass a message on to the next replica."""
    following, before = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    return peers.exchange({following: message(50, peers.rank)}, [before], 50)


def check_primitives(size: int, rank: int, found: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    by_server, by_all, vectors = found
    assert torch.equal(by_server, total(size))
    assert torch.equal(by_all, total(size))
    assert all(torch.equal(one, vector(rank)) for rank, one in enumerate(vectors))


def check_ring(size: int, rank: int, found: dict[int, Tensor]) -> None:
    """Each has the message of the one before it, and no other."""
    before = (rank - 1) % size
    assert list(found) == [before]
    assert torch.equal(found[before], message(50, before))
