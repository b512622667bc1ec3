"""Averaged updates with error feedback: CocktailSGD's relative that learns more like all-reduce.

Replicas train locally and exchange how far they moved (`gradcomp/move_exchange.py`), but

* **Moves count by how far gradients agree.** Where they are mostly noise, or where a few replicas
  see what the others do not, moves that Adam brought to full length on each replica cancel, or are
  divided, in the mean: the model steps less far than with all-reduce. What is missing is measured
  (`gradcomp/agreement.py`), and moves count that much more: in full where replicas see different
  things, and half of it, in logarithms, where they differ by noise, since what travels late is to
  be small.
* **Parameters keep half of what is not yet sent**: they are g + r / 2 and the newest move, where
  CocktailSGD's are g + r. What is not yet sent is mostly this replica's own noise.
* **All of a subset travels, at one bit**: signs times the mean magnitude of each group.

`benchmarks/results/replicas_gpt2_cpu_202611.md` has what they are worth.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from torch import nn

from thinpipe.gradcomp.global_copy import OwedBucket, SharedBucket
from thinpipe.gradcomp.move_exchange import Ladder, MoveConfig, MoveExchange
from thinpipe.gradcomp.options import TrainOptions
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.replica_sync import ReplicaSync
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.sign_mean import SignMean
from thinpipe.pipeline.wire.uniform import Uniform

REPLICAS_EQUAL = False
_POWER = 0.5
"""Between moves as they are and moves as long as all-reduce's; see the results page."""


LADDER: Ladder = [
    ({"subset": subset, "bits": bits}, subset * (bits + 16 / 128))
    for subset, bits in (
        *((0.04, 1), (0.08, 1), (0.125, 1), (0.25, 1), (0.5, 1), (1.0, 1)),
        *((1.0, 2), (1.0, 4), (1.0, 8)),
    )
]
"""With how many bits a parameter costs each way."""


class Config(MoveConfig):
    """`subset` of the parameters take turns and travel at `bits` per value, signs at 1."""

    subset: float = Field(0.125, gt=0, le=1)
    bits: int = Field(1, ge=1, le=8)

    ladder: ClassVar[Ladder] = LADDER
    bucket: ClassVar[type[SharedBucket]] = OwedBucket
    gain_power: ClassVar[float | None] = _POWER

    @property
    def codec(self) -> Codec:
        return SignMean(self.group) if self.bits == 1 else Uniform(self.bits, self.group)


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> MoveExchange:
    """Make the method."""
    return MoveExchange(parameters, peers, config)


def optimizer(
    config: Config, parameters: Sequence[nn.Parameter], train: TrainOptions, sync: ReplicaSync
) -> None:
    """Any Adam does; the exchange is told its beta2."""
    assert isinstance(sync, MoveExchange)
    sync.follow(train.betas[1])
