"""Averaged updates with error feedback: CocktailSGD's relative that learns like all-reduce.

Replicas train locally and exchange how far they moved (`gradcomp/move_exchange.py`), but

* **Steps are longer.** Where gradients are mostly noise, R replicas' moves, each of which Adam
  brought to full length, cancel in the mean, and the model steps sqrt(rho) as far as with
  all-reduce, where rho measures how far gradients agree (`gradcomp/agreement.py`). Each move counts
  `gain` times; "auto" makes up for half of that, rho^(-1/4), as what travels late is to be small.
* **Parameters keep a share of what is not yet sent**: they are g + `residual` r and the newest
  move, where CocktailSGD's are g + r. What is not yet sent is mostly this replica's own noise.
* **All of a subset travels, at one bit**: signs times the mean magnitude of each group.

`benchmarks/results/replicas_gpt2_cpu_202611.md` has what each of the three is worth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from thinpipe.gradcomp.agreement import Agreement
from thinpipe.gradcomp.buckets import Bucket
from thinpipe.gradcomp.budget import Choice
from thinpipe.gradcomp.global_copy import OwedBucket
from thinpipe.gradcomp.move_exchange import MoveConfig, MoveExchange
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.sign_mean import SignMean
from thinpipe.pipeline.wire.uniform import Uniform

REPLICAS_EQUAL = False


@dataclass(frozen=True)
class BitsChoice(Choice):
    """All of the subset, `bits` each."""

    bits: int


CHOICES: dict[Choice, float] = {
    BitsChoice(subset, bits): subset * (bits + 16 / 128)
    for subset, bits in (
        *((0.04, 1), (0.07, 1), (0.14, 1), (0.28, 1), (0.5, 1), (1.0, 1)),
        *((1.0, 2), (1.0, 4), (1.0, 8)),
    )
}
"""With how many bits a parameter costs each way."""


class Config(MoveConfig):
    """`subset` of the parameters take turns and travel at `bits` per value, signs at 1.

    `gain` is what a move counts, `residual` the share of unsent moves in a replica's parameters.
    """

    subset: float = Field(0.14, gt=0, le=1)
    bits: int = Field(1, ge=1, le=8)
    gain: Literal["auto"] | Annotated[float, Field(gt=0)] = "auto"
    residual: float = Field(0.5, ge=0, le=1)

    @property
    def choice(self) -> BitsChoice:
        """What is sent at first."""
        return BitsChoice(self.subset, self.bits)

    @property
    def choices(self) -> Mapping[Choice, float]:
        """What a budget chooses from."""
        return CHOICES

    def codec(self, choice: Choice) -> Codec:
        """Signs, or levels."""
        assert isinstance(choice, BitsChoice)
        return SignMean(self.group) if choice.bits == 1 else Uniform(choice.bits, self.group)

    def bucket(self, bucket: Bucket) -> OwedBucket:
        """What is not yet sent is kept apart."""
        gain = 1.0 if self.gain == "auto" else self.gain
        return OwedBucket(bucket, residual=self.residual, gain=gain)

    def gain_of(self, agreement: Agreement) -> float | None:
        """Half of what is missing, in logarithms."""
        return agreement.rho**-0.25 if self.gain == "auto" else None


def build(config: Config, parameters: Sequence[nn.Parameter], peers: Peers) -> MoveExchange:
    """Make the method."""
    return MoveExchange(parameters, peers, config)
