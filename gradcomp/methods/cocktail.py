"""CocktailSGD: random subset, top-k and quantization together, both ways, during compute.

Wang et al., "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks", ICML 2023,
Algorithm 1, in the form of the authors' code: replicas train locally, and what they exchange is how
far their parameters x have moved from a global copy g (`gradcomp/move_exchange.py`). What is not
yet sent stays in x: r = x - g.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import AliasChoices, ConfigDict, Field
from torch import nn

from thinpipe.gradcomp.move_exchange import Ladder, MoveConfig, MoveExchange
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.sparse import SparseCodec

REPLICAS_EQUAL = False


LADDER: Ladder = [
    ({"subset": subset, "topk": topk, "bits": bits}, cost)
    for subset, topk, bits, cost in (
        (0.05, 0.1, 4, 0.044),
        (0.05, 0.2, 4, 0.069),
        (0.1, 0.2, 4, 0.138),
        (0.2, 0.2, 4, 0.276),
        (0.3, 0.3, 4, 0.60),
        (0.5, 0.4, 4, 1.3),
        (1.0, 0.5, 4, 2.9),
        (1.0, 1.0, 4, 3.9),
        (1.0, 1.0, 8, 8.1),
    )
]
"""With about how many bits a parameter costs each way (normal changes)."""


class Config(MoveConfig):
    """`subset` of the parameters take turns, the largest `topk` of them are sent, `bits` each.

    The names of the authors' environment variables are accepted too.
    """

    model_config = ConfigDict(populate_by_name=True)

    subset: float = Field(0.1, gt=0, le=1, validation_alias=AliasChoices("subset", "RANDOMP_RATIO"))
    topk: float = Field(0.2, gt=0, le=1, validation_alias=AliasChoices("topk", "TOPK_RATIO"))
    bits: int = Field(4, validation_alias=AliasChoices("bits", "QUANT_BITS"))

    ladder: ClassVar[Ladder] = LADDER

    @property
    def codec(self) -> SparseCodec:
        """Values that are kept, and where they are."""
        return SparseCodec(self.topk, self.bits, self.group)


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> MoveExchange:
    """Make the method."""
    return MoveExchange(parameters, peers, config)
