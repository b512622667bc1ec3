"""Decentralized averaging at 8 bits: on a ring, of changes against what both ends keep.

Tang et al., "Communication Compression for Decentralized Training" (DCD), 2018; Gan et al.,
"BAGUA", VLDB 2022 (decentralized low precision). Every replica keeps what it last sent, w, and what
its two neighbours did, L and R. With x its parameters now:

    c = C(x + L / 3 + R / 3 - 5 w / 3)      to both neighbours
    L += c of the left,  R += c of the right,  w += c,  x = w

What C left out is not lost: the next change is measured against w, which both ends have. It is
AQ-SGD's idea, applied to parameters.

Axes: N values of a bucket.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.base import Staged
from thinpipe.gradcomp.decentral import Decentral
from thinpipe.gradcomp.exchange import ExchangeKey, swap
from thinpipe.gradcomp.global_copy import FlatBucket
from thinpipe.gradcomp.methods.decentralized import neighbours
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.uniform import Uniform

REPLICAS_EQUAL = False


class Config(ExchangeOptions):
    """`bits` per value."""

    bits: int = Field(8, ge=2, le=8)


class Changes(Staged):
    """The averaging, with w and both neighbours' copies of theirs, by bucket and replica."""

    def __init__(self, peers: Peers, config: Config) -> None:
        super().__init__()
        self._peers, self._codec = peers, Uniform(config.bits, config.group)
        self._ring = [(peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size]

    def begin(self, buckets: Sequence[FlatBucket]) -> None:
        for bucket in buckets:
            for replica in {self._peers.rank, *self._ring}:
                self.set(f"{bucket.index}-{replica}", bucket.local_N.float().clone())
        self.keep()

    def average(self, bucket: FlatBucket, key: ExchangeKey) -> Tensor:
        """What the neighbours will keep of this replica."""
        me = self._peers.rank
        kept = {replica: self._of(bucket, replica) for replica in (me, *self._ring)}
        change_N = torch.add(bucket.local_N.float(), kept[me], alpha=-5 / 3)
        for side in self._ring:
            change_N.add_(kept[side], alpha=1 / 3)
        seen_N = torch.empty_like(change_N)
        others = neighbours(me, self._peers.size, key.step, "ring")
        found = swap(self._peers, key, change_N, others, codec=self._codec, seen_N=seen_N)
        new = {replica: kept[replica] + c for replica, c in {**found, me: seen_N}.items()}
        for replica, w in new.items():
            self.set(f"{bucket.index}-{replica}", w)
        return new[me]

    def _of(self, bucket: FlatBucket, replica: int) -> Tensor:
        kept = self.get(f"{bucket.index}-{replica}", bucket.local_N.device)
        assert kept is not None, "set at the beginning"
        return kept


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> Decentral:
    averaging = Changes(peers, config)
    return Decentral(parameters, peers, averaging, nbytes=config.bucket_nbytes, interval=1)
