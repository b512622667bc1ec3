"""Plain b-bit quantization of the gradients on both ways, with error feedback on both.

The scheme of 1-bit Adam and of QuantizedAdam, with b bits.
"""

from collections.abc import Sequence

from pydantic import Field
from torch import nn

from thinpipe.gradcomp.feedback import ServedReducer
from thinpipe.gradcomp.gradient_sync import GradientSync
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.uniform import Uniform

REPLICAS_EQUAL = True
GOES_ON = True


class Config(ExchangeOptions):
    """`bits` per value."""

    bits: int = Field(4, ge=1, le=8)


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> GradientSync:
    """Make the method."""
    reducer = ServedReducer(peers, Uniform(config.bits, config.group))
    return GradientSync(parameters, peers, reducer, config.bucket_nbytes)
