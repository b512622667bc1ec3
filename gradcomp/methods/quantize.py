"""Plain b-bit quantization of the gradients on both ways, with error feedback on both.

Every replica quantizes its part for each server and remembers what it left out; so does each
server with the sum it answers with (the scheme of 1-bit Adam and of QuantizedAdam, with b bits).
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.buckets import Bucket
from thinpipe.gradcomp.exchange import ExchangeKey, reduce_sharded
from thinpipe.gradcomp.feedback import FeedbackReducer
from thinpipe.gradcomp.gradient_sync import GradientSync
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.uniform import Uniform

REPLICAS_EQUAL = True


class Config(ExchangeOptions):
    """`bits` per value, one bf16 scale per `group` values."""

    bits: int = Field(4, ge=1, le=8)
    group: int = Field(128, ge=1)


class Quantize(FeedbackReducer):
    """A reducer with a residual per bucket and one per shard served."""

    def reduce(self, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        """Sum of what was quantized, quantized."""
        target_N = self._residuals.add_to(f"sent-{bucket.index}", flat_N)
        reduced = reduce_sharded(
            self._peers,
            key,
            target_N.tensor_split(self._peers.size),
            codec=self._codec,
            finish=lambda total_n: self._residuals.add_to(f"served-{bucket.index}", total_n),
        )
        self._residuals.leave(f"sent-{bucket.index}", target_N - torch.cat(reduced.seen))
        self._residuals.leave(f"served-{bucket.index}", reduced.left_n)
        return torch.cat(reduced.results)


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> GradientSync:
    """Make the method."""
    reducer = Quantize(peers, Uniform(config.bits, config.group))
    return GradientSync(parameters, peers, reducer, config.bucket_nbytes)
