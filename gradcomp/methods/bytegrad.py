"""ByteGrad: gradients summed at 8 bits on both ways, without error feedback.

Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2022, centralized
low precision. Every replica takes the servers' answers as they were sent, its own shard's too, so
replicas stay equal. BAGUA quantizes between the smallest and the largest value of a whole shard;
here `group` values share a scale, so that one outlier does not cost the others their precision.
"""

from collections.abc import Sequence

from torch import nn

from thinpipe.gradcomp.gradient_sync import AllReduce, GradientSync
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.uniform import Uniform

REPLICAS_EQUAL = True
GOES_ON: dict[str, object] = {}
_BITS = 8


class Config(ExchangeOptions):
    """It has no settings of its own."""


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> GradientSync:
    reducer = AllReduce(peers, Uniform(_BITS, config.group))
    return GradientSync(parameters, peers, reducer, config.bucket_nbytes)
