"""Objectives of training and evaluation: token losses, or one label per sample.

Axes: B samples, T tokens, V vocabulary, C classes.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from thinpipe.pipeline.batch import IGNORED_TARGET


class Objective(Protocol):
    """Turns the last stage's outputs and a batch's targets into losses that can be added up."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """What evaluations measure besides the loss unless settings say it (`metrics.py`)."""

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses, a scalar in fp32."""

    def count(self, targets: Tensor) -> int:
        """How many losses the sum has; training divides by their number over all replicas."""


class _Counted:
    """Counts targets; -100 is not counted."""

    def count(self, targets: Tensor) -> int:
        return int((targets != IGNORED_TARGET).sum())


@dataclass(frozen=True)
class NextToken(_Counted):
    """Cross entropy of every token: logits [B, T, V], targets [B, T]."""

    metrics: tuple[str, ...] = ()

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, -2).float(),
            targets.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction="sum",
        )


@dataclass(frozen=True)
class Classification(NextToken):
    """Cross entropy of one label per sample: logits [B, C], targets [B]."""

    metrics: tuple[str, ...] = ("accuracy", "matthews")


@dataclass(frozen=True)
class SeveralLabels(_Counted):
    """Binary cross entropy of C labels per sample: logits [B, C], targets [B, C], 0 or 1.

    As in transformers, the mean is over samples and labels.
    """

    metrics: tuple[str, ...] = ("accuracy", "f1")

    def loss_sum(self, logits_BC: Tensor, targets_BC: Tensor) -> Tensor:
        each_BC = F.binary_cross_entropy_with_logits(
            logits_BC.float(), targets_BC.float(), reduction="none"
        )
        return each_BC.where(targets_BC != IGNORED_TARGET, 0).sum()


@dataclass(frozen=True)
class Regression(_Counted):
    """Squared error of C numbers per sample: outputs [B, C], targets [B, C].

    As in transformers, the mean is over samples and numbers.
    """

    metrics: tuple[str, ...] = ("pearson", "spearman")

    def loss_sum(self, outputs_BC: Tensor, targets_BC: Tensor) -> Tensor:
        each_BC = (outputs_BC.float() - targets_BC).square()
        return each_BC.where(targets_BC != IGNORED_TARGET, 0).sum()


def mean_loss(total: float, count: float) -> float:
    """The mean of so many losses; NaN of none, which is no loss of 0."""
    return total / count if count else math.nan
