"""Uncompressed sum of the gradients, or rounded to bf16: the baseline of every other method."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from thinpipe.gradcomp.buckets import Bucket
from thinpipe.gradcomp.exchange import ExchangeKey, sum_sharded
from thinpipe.gradcomp.gradient_sync import GradientSync
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Codec

REPLICAS_EQUAL = True


class Config(ExchangeOptions):
    """What gradients travel as; sums are always made in fp32."""

    format: Literal["fp32", "bf16"] = "fp32"


class AllReduce:
    """A reducer whose servers send the sum of what they got."""

    def __init__(self, peers: Peers, codec: Codec) -> None:
        self._peers, self._codec = peers, codec

    def reduce(self, bucket: Bucket, flat_N: Tensor, key: ExchangeKey) -> Tensor:
        """Sum, with one rounding on each way."""
        return sum_sharded(self._peers, key, flat_N, codec=self._codec)

    def keep(self) -> None:
        """There is no memory."""

    def state_dict(self) -> dict[str, Any]:
        """There is no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is no state."""


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> GradientSync:
    """Make the method."""
    reducer = AllReduce(peers, Cast(config.format))
    return GradientSync(parameters, peers, reducer, config.bucket_nbytes)
