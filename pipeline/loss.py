"""Objectives of training and evaluation: token losses, or one label per sample.

Axes: B samples, T tokens, V vocabulary, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_TARGET = -100


class Objective(Protocol):
    """Turns the last stage's outputs and a batch's targets into numbers that can be added up."""

    @property
    def tally_size(self) -> int:
        """Length of what `tally` returns."""

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses, a scalar in fp32."""

    def count(self, targets: Tensor) -> int:
        """How many losses the sum has; training divides by their number over all replicas."""

    def tally(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Numbers that evaluation adds up over batches and replicas (float64).

        The loss sum and the count come first.
        """

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """`loss`, and what else follows from the whole tally, by name."""


@dataclass(frozen=True)
class NextToken:
    """Cross entropy of every token: logits [B, T, V], targets [B, T]; -100 is not counted."""

    tally_size: int = 2

    def loss_sum(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        return _cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def count(self, targets_BT: Tensor) -> int:
        return int((targets_BT != IGNORED_TARGET).sum())

    def tally(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        return loss_head(self.loss_sum(logits_BTV, targets_BT), self.count(targets_BT))

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        return {"loss": tally[0] / max(tally[1], 1)}


@dataclass(frozen=True)
class Classification:
    """Cross entropy of one label per sample: logits [B, C], targets [B]; -100 is not counted."""

    classes: int

    @property
    def tally_size(self) -> int:
        """Loss sum, samples, and how often class i was taken for class j."""
        return 2 + self.classes**2

    def loss_sum(self, logits_BC: Tensor, targets_B: Tensor) -> Tensor:
        return _cross_entropy(logits_BC, targets_B)

    def count(self, targets_B: Tensor) -> int:
        return int((targets_B != IGNORED_TARGET).sum())

    def tally(self, logits_BC: Tensor, targets_B: Tensor) -> Tensor:
        """Loss sum, samples, then the confusion matrix by rows of the true class."""
        known = targets_B != IGNORED_TARGET
        pairs = targets_B[known] * self.classes + logits_BC[known].argmax(-1)
        confusion = torch.bincount(pairs, minlength=self.classes**2).double().cpu()
        return torch.cat(
            [loss_head(self.loss_sum(logits_BC, targets_B), int(known.sum())), confusion]
        )

    def metrics(self, tally: Sequence[float]) -> dict[str, float]:
        """The mean loss, the accuracy, and the Matthews correlation (-1 to 1)."""
        confusion = torch.tensor(tally[2:], dtype=torch.float64).view(self.classes, self.classes)
        count = max(tally[1], 1)
        return {
            "loss": tally[0] / count,
            "accuracy": float(confusion.trace()) / count,
            "matthews": _matthews(confusion),
        }


def _matthews(confusion_CC: Tensor) -> float:
    """R_K statistic (Gorodkin 2004), for two classes Matthews' correlation.

    It is 0 where it is not defined: when one class is all that occurs or all that is answered.
    """
    true_C, answered_C = confusion_CC.sum(1), confusion_CC.sum(0)
    total = confusion_CC.sum()
    covariance = confusion_CC.trace() * total - true_C @ answered_C
    spread = (total**2 - answered_C @ answered_C) * (total**2 - true_C @ true_C)
    return float(covariance) / math.sqrt(float(spread)) if spread > 0 else 0.0


def loss_head(loss: Tensor, count: int) -> Tensor:
    """The beginning of every tally: loss sum and number of losses (float64)."""
    return torch.stack([loss.double().cpu(), torch.tensor(float(count), dtype=torch.float64)])


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED_TARGET, reduction="sum")
