"""The sender's choice of a message's quantization step.

Axes: N tokens, D channels, K dimensions.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinpipe.aqsgd.transform.basis import step_index

STEP_RANGE = 480
"""Of indices: steps from 2^-120 to 2^120."""
_COARSEST = 3.0
"""Steps that follow changes, as a multiple of those of first visits."""
_MASSIVE = 100.0
"""A channel of the largest 2 % does not count for the step if its mean square is so many times that
of the others' largest."""


@dataclass(frozen=True)
class Steps:
    """Steps as multiples of an rms: of the change ("change") or of the value itself ("value").

    First visits take `first` times the value's rms; steps that follow changes are not over 3 times
    as large, as changes from scratch are as large as values. With `error`, steps are such that
    decoded values differ from what they should be by that much, relative to the value.
    """

    change: float
    first: float
    of: Literal["change", "value"] = "change"
    error: float | None = None

    def choose(self, known: bool, change_ND: Tensor, change_NK: Tensor, value_ND: Tensor) -> int:
        """Index of the step for these tokens.

        `change_ND` is what is to be sent of them, the value itself if they are not `known`, and
        `change_NK` the same in coefficients.
        """
        if self.error is not None:
            return self._by_error(change_ND, change_NK, value_ND)
        if not known:
            return _index(self.first * _rms(value_ND))
        if self.of == "value":
            return _index(self.change * _rms(value_ND))
        coarsest = _index(_COARSEST * self.first * _rms(value_ND))
        return min(_index(self.change * _rms(change_ND)), coarsest)

    def _by_error(self, change_ND: Tensor, change_NK: Tensor, value_ND: Tensor) -> int:
        """Reverse water-filling: a dimension's error is a step's, or all of what is smaller.

        What the basis leaves out is part of the error, but not more than three quarters.
        """
        assert self.error is not None
        square_K = change_NK.double().square().mean(0).sort().values
        allowed = (self.error * _rms(value_ND)) ** 2 * value_ND.shape[1]
        left_out = float(change_ND.double().square().sum(1).mean() - square_K.sum())
        allowed = max(allowed - left_out, allowed / 4)
        below_K = square_K.cumsum(0) - square_K  # of dimensions that are given up
        left_K = torch.arange(len(square_K), 0, -1)
        level_K = (allowed - below_K) / left_K
        fits = torch.nonzero(level_K <= square_K).flatten()
        level = float(level_K[fits[0]]) if len(fits) else float(square_K[-1])
        return _index((12 * max(level, 0.0)) ** 0.5)


def _rms(value_ND: Tensor) -> float:
    """Without channels of massive activations, which are few, and the same in every token."""
    square_D = value_ND.double().square().mean(0).sort(descending=True).values
    few = min(max(2, len(square_D) // 50), len(square_D) - 1)
    usual = float(square_D[few])
    massive = int((square_D[:few] > _MASSIVE * usual).sum()) if usual else 0
    return float(square_D[massive:].mean().sqrt())


def _index(size: float) -> int:
    if not size > 0:
        return -STEP_RANGE
    return max(-STEP_RANGE, min(step_index(size), STEP_RANGE))
