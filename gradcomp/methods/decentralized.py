"""Decentralized averaging at full precision: with both neighbours on a ring, or in shifting pairs.

Gan et al., "BAGUA", VLDB 2022 (decentralized full precision); Lian et al. 2017. In pairs, replica r
of the first half of R meets replica R / 2 + (r + t) mod R / 2 in exchange t: after R / 2 of them it
has met all of the other half. Both keep the mean of the replicas as it is.

Axes: N values of a bucket.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.base import Stateless
from thinpipe.gradcomp.decentral import Decentral
from thinpipe.gradcomp.exchange import EXACT, ExchangeKey, swap
from thinpipe.gradcomp.global_copy import FlatBucket
from thinpipe.gradcomp.options import ExchangeOptions, ReplicaCountError
from thinpipe.pipeline.comm.transport import Peers

REPLICAS_EQUAL = False


class Config(ExchangeOptions):
    """Whom a replica averages with, every `interval` steps."""

    peers: Literal["ring", "pairs"] = "ring"
    interval: int = Field(1, ge=1)


class Neighbours(Stateless):
    """The averaging; it keeps no state."""

    def __init__(self, peers: Peers, config: Config) -> None:
        """Reject pairs that cannot be made.

        Raises:
            ReplicaCountError: an odd number of replicas is to meet in pairs.
        """
        if config.peers == "pairs" and peers.size % 2 and peers.size > 1:
            raise ReplicaCountError(
                f'gradcomp.decentralized.peers = "pairs": {peers.size} replicas are not pairs; use '
                '"ring", or an even number of replicas'
            )
        self._peers, self._config = peers, config

    def begin(self, buckets: Sequence[FlatBucket]) -> None: ...

    def average(self, bucket: FlatBucket, key: ExchangeKey) -> Tensor:
        others = neighbours(self._peers.rank, self._peers.size, key.step, self._config.peers)
        mine_N = bucket.local_N.float()
        found = swap(self._peers, key, mine_N, others, codec=EXACT)
        found[self._peers.rank] = mine_N
        total_N = torch.zeros_like(mine_N)
        for peer in sorted(found):
            total_N += found[peer] / len(found)
        return total_N


def neighbours(rank: int, size: int, exchange: int, peers: str) -> list[int]:
    """Whom a replica meets in an exchange."""
    if peers == "ring":
        return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    half = size // 2
    if rank < half:
        return [half + (rank + exchange) % half]
    return [(rank - half - exchange) % half]


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> Decentral:
    averaging = Neighbours(peers, config)
    return Decentral(
        parameters, peers, averaging, nbytes=config.bucket_nbytes, interval=config.interval
    )
