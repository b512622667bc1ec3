"""Error feedback: what a compressor left out of a vector is added to the next one.

Seide et al. 2014; Stich et al. 2018. With it, what was sent plus the residual equals the sum
of all that was to be sent.

Axes: N values.
"""

from typing import Any

import torch
from torch import Tensor

from thinpipe.gradcomp.base import Staged
from thinpipe.gradcomp.buckets import Bucket
from thinpipe.gradcomp.exchange import ExchangeKey, reduce_sharded
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.codec import Codec


class FeedbackReducer(Staged):
    """Base of reducers that keep residuals (fp32) by name; each adds `reduce`."""

    def __init__(self, peers: Peers, codec: Codec) -> None:
        super().__init__()
        self._peers, self._codec = peers, codec

    def add_to(self, name: str, x_N: Tensor) -> Tensor:
        """Add to `x_N`, in place, what was left out before."""
        left_N = self.get(name, x_N.device)
        return x_N if left_N is None else x_N.add_(left_N)

    def regroup(self, rank: int, size: int) -> None:
        """Replicas left or came; this one was `rank` of `size`. What it owes stays owed."""

    def shared_state(self) -> dict[str, Any]:
        """Who joins owes nothing."""
        return {}


class ServedReducer(FeedbackReducer):
    """A reducer with a residual per bucket and one per shard served; both ways take the codec.

    What a replica's message leaves out of its part is added to its next one; so is what the answer
    of a shard's server leaves out of the sum (the scheme of 1-bit Adam).
    """

    def reduce(self, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        sent, served = f"sent-{bucket.index}", f"served-{bucket.index}"
        target_N = self.add_to(sent, flat_N)
        reduced = reduce_sharded(
            self._peers,
            key,
            target_N.tensor_split(self._peers.size),
            codec=self._codec,
            finish=lambda total_n: self.add_to(served, total_n),
        )
        self.set(sent, target_N - torch.cat(reduced.seen))
        self.set(served, reduced.left_n)
        return torch.cat(reduced.results)

    def forget(self, bucket: Bucket) -> None:
        """What the last `reduce` of it has changed does not count."""
        for name in (f"sent-{bucket.index}", f"served-{bucket.index}"):
            self._fresh.pop(name, None)

    def regroup(self, rank: int, size: int) -> None:
        """Shards change. What this replica's answers lack, it sends from now on itself.

        So only what the lost ones owed is lost.
        """
        for name in [name for name in self._kept if name.startswith("served-")]:
            sent_N = self._kept[name.replace("served", "sent")]
            sent_N.tensor_split(size)[rank].add_(self._kept.pop(name))
