"""The largest gradients, a few bits each, on both ways, with error feedback on both.

CocktailSGD's codec without its subsets (Wang et al., ICML 2023) on gradients instead of moves: one
optimizer sees the same sums on all replicas, so its steps are as long as those of all-reduce, and
the bytes do not grow with the number of replicas as they do where each sends to all (`topk`).
`delayed`, sums travel during the next step and are applied with it.
"""

from collections.abc import Sequence

from pydantic import Field, model_validator
from torch import nn

from thinpipe.gradcomp.delayed_sync import DelayedGradientSync
from thinpipe.gradcomp.feedback import ServedReducer
from thinpipe.gradcomp.gradient_sync import GradientSync
from thinpipe.gradcomp.options import ExchangeOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.sparse import SparseCodec

REPLICAS_EQUAL = True
GOES_ON = True


class Config(ExchangeOptions):
    """`fraction` of a message is sent, at `bits` each: 1 to 8, 16 (bf16) or 32 (fp32).

    `delayed`: an exchange has the time of a whole step, and is applied one step later.
    """

    fraction: float = Field(0.015, gt=0, le=1)
    bits: int = 4
    delayed: bool = False

    @model_validator(mode="after")
    def _can_be_built(self) -> "Config":
        _ = self.codec  # rejects what it cannot be
        return self

    @property
    def codec(self) -> SparseCodec:
        return SparseCodec(self.fraction, self.bits, self.group)


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> GradientSync:
    """Make the method."""
    kind = DelayedGradientSync if config.delayed else GradientSync
    return kind(parameters, peers, ServedReducer(peers, config.codec), config.bucket_nbytes)
