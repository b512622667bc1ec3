"""What the sender chooses for each token: how coarse its step is, and how much of its cache counts.

A choice is a symbol of 5 bits, entropy-coded with frequencies that both ends learn. Steps are
2^(coarse / 2) times the message's. Of what is cached, all counts or less: gradients resemble those
of the last visit more in some tokens than in others.

Massive activations (Sun et al. 2024, arXiv 2402.17762) make a few tokens hundreds of times larger
than the rest. Their steps are coarser, so that their coefficients stay small.

Axes: N tokens, K dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

COARSEST = 7  # 3 bits, the others of a row's byte being taken (rows.py): steps 11 times as coarse
SYMBOLS = 32  # 8 steps x 4 shares
NEUTRAL = 3
"""How coarse a token of usual weight is, where there are weights: others are up to 2.8 times finer
and 4 times coarser."""
SHARES = torch.tensor([4, 3, 2, 0])
"""Of what is cached, in quarters, by their number."""
_MASSIVE = 8.0  # times the median size, from where on steps grow with a token


class Choice(NamedTuple):
    """Of every token: half octaves that its step is coarser, and which share of its cache counts
    (0: all, 1: three quarters, 2: half, 3: nothing). int64.
    """

    coarse_N: Tensor
    share_N: Tensor

    @property
    def symbols(self) -> Tensor:
        return (self.coarse_N + (COARSEST + 1) * self.share_N).to(torch.uint8)

    @staticmethod
    def of(symbol_N: Tensor) -> "Choice":
        number_N = symbol_N.long()
        return Choice(number_N & COARSEST, number_N >> 3)

    def counted(self, held_NK: Tensor) -> Tensor:
        """What counts of cached coefficients (int32)."""
        # quarters, rounded in whole numbers: both ends must get the same
        return (held_NK * SHARES[self.share_N, None].int() + 2) >> 2


def best_shares(value_NK: Tensor, held_NK: Tensor) -> Tensor:
    """For each token the share of what is cached that leaves the smallest magnitudes to send.

    Magnitudes, not squares: what is left in a few dimensions alone takes few bits. A massive one
    counts for no more than eight times the median, as it would decide alone.
    """
    most_N1 = _MASSIVE * value_NK.abs().median(1, keepdim=True).values
    left = [
        (value_NK - share / 4 * held_NK).abs().minimum(most_N1).sum(1) for share in SHARES.tolist()
    ]
    return torch.stack(left).argmin(0)


def median_size(x_ND: Tensor) -> Tensor:
    """Of tokens that are not zero, as gradients of padding are; 0 if all are."""
    size_N = x_ND.abs().mean(1)
    return size_N.where(size_N > 0, torch.nan).nanmedian().nan_to_num()


def usual(value_NK: Tensor) -> Tensor:
    """Which tokens (bool) are neither massive nor zero."""
    size_N = value_NK.abs().mean(1)
    return (size_N > 0) & (size_N <= _MASSIVE * median_size(value_NK))


def coarseness(value_NK: Tensor, weight_N: Tensor | None) -> Tensor:
    """For each token, from its size, and from how much an error in it matters, if that is known.

    `weight_N` is in octaves, about 0 on average.
    """
    size_N = value_NK.abs().mean(1)
    largest = _MASSIVE * median_size(value_NK).clamp_min(1e-30)
    coarse_N = (2 * (size_N / largest).clamp_min(1.0).log2()).round()
    if weight_N is not None:
        coarse_N += NEUTRAL - (2 * weight_N).round()
    return coarse_N.clamp_(0, COARSEST).long()
