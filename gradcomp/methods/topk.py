"""Plain top-k of the gradients with error feedback: every replica sends its largest to all others.

Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018; one residual per bucket.
"""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor, nn

from thinpipe.gradcomp.buckets import Bucket
from thinpipe.gradcomp.exchange import ExchangeKey, gather_sum
from thinpipe.gradcomp.feedback import FeedbackReducer
from thinpipe.gradcomp.gradient_sync import GradientSync
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.sparse import SparseCodec

REPLICAS_EQUAL = True
GOES_ON: dict[str, object] = {}


class Config(ExchangeOptions):
    """`fraction` of the gradients is sent, at `bits` each: 1 to 8, 16 (bf16) or 32 (fp32)."""

    fraction: float = Field(0.01, gt=0, le=1)
    bits: int = 16

    @property
    def codec(self) -> SparseCodec:
        return SparseCodec(self.fraction, self.bits)


class TopK(FeedbackReducer):
    """A reducer with a residual per bucket."""

    def reduce(self, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        target_N = self.add_to(f"{bucket.index}", flat_N)
        total_N, seen_N = gather_sum(self._peers, key, target_N, codec=self._codec)
        self.set(f"{bucket.index}", target_N.sub_(seen_N))
        return total_N


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> GradientSync:
    return GradientSync(parameters, peers, TopK(peers, config.codec), config.bucket_nbytes)
