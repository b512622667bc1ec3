"""The sender's choice of a message's quantization step.

Axes: N tokens, D channels, K dimensions.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from thinpipe.aqsgd.transform.basis import exact_dimensions, step_index

STEP_RANGE = 480
"""Of indices, 4 per octave: steps from 2^-120 to 2^120, all of them normal numbers in fp32."""
# From scratch, with one step for all tokens, a direction of the quickstart's model grew to 99 % of
# the energy and everything else was coded ever coarser: +0.016 above fp32 in epoch 4, +0.090 in
# epoch 7 (benchmarks/results/transform_cpu_202611.md). So steps follow what is outside the largest
# 2 % of directions where these hold over four fifths, and get 8 times finer at most.
_MOST_OF_OTHERS = 5.0
_MOST_FINER = 8.0
MASSIVE = 100.0
"""A channel of the largest 2 % does not count for the step if its mean square is so many times that
of the others' largest. Massive activations are in few channels, the same in every token."""


@dataclass(frozen=True)
class Steps:
    """Steps as multiples of an rms: `change` of the change's, but at most `largest` of the value's.

    From scratch changes are as large as values, hence the limit. First visits take `first` times
    the value's rms.
    """

    change: float
    first: float
    largest: float

    def choose(
        self, known: bool, change_ND: Tensor, change_NK: Tensor, value_ND: Tensor, value_NK: Tensor
    ) -> int:
        """Index of the step for these tokens.

        `change_ND` is what is to be sent of them, the value itself if they are not `known`;
        `change_NK` and `value_NK` are coefficients.
        """
        value = _rms(value_ND, value_NK)
        if not known:
            return _index(self.first * value)
        following = self.change * _rms(change_ND, change_NK)
        return _index(min(following, self.largest * value))


def _rms(x_ND: Tensor, x_NK: Tensor) -> float:
    """Without massive activations, which are in few channels, or in few directions.

    The largest 2 % of directions count for four times what the others have, at most, as far as that
    makes it no less than an eighth.
    """
    square_D, square_K = (
        x.double().square().mean(0).sort(descending=True)[0] for x in (x_ND, x_NK)
    )
    width = len(square_D)
    mean = min(_without_massive(square_D), _without_massive(square_K)) / width
    left_out = square_D.sum() - square_K.sum() if len(square_K) < width else 0.0
    others = float(square_K[most_massive(len(square_K)) :].sum() + left_out) / width
    return math.sqrt(max(min(mean, _MOST_OF_OTHERS * others), mean / _MOST_FINER**2))


def _without_massive(square_K: Tensor) -> float:
    """The sum of what is not massive; the largest come first."""
    few = most_massive(len(square_K))
    usual = float(square_K[few])
    massive = int((square_K[:few] > MASSIVE * usual).sum()) if usual else 0
    return float(square_K[massive:].sum())


def most_massive(dimensions: int) -> int:
    """How many of them, at most, are massive."""
    return min(exact_dimensions(dimensions), dimensions - 1)


def _index(size: float) -> int:
    if not size > 0:
        return -STEP_RANGE
    return max(-STEP_RANGE, min(step_index(size), STEP_RANGE))
