"""Uncompressed sum of the gradients, or rounded to bf16: the baseline of every other method."""

from collections.abc import Sequence
from typing import Literal

from torch import nn

from thinpipe.gradcomp.gradient_sync import AllReduce, GradientSync
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.cast import Cast

REPLICAS_EQUAL = True
GOES_ON: dict[str, object] = {}


class Config(ExchangeOptions):
    """Format of gradients on the wire; sums are always made in fp32."""

    format: Literal["fp32", "bf16"] = "fp32"


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> GradientSync:
    reducer = AllReduce(peers, Cast(config.format))
    return GradientSync(parameters, peers, reducer, config.bucket_nbytes)
