"""Losses, and that what is ignored counts nowhere."""

import math

import pytest
import torch

from thinpipe.pipeline.loss import Classification, NextToken, mean_loss


def test_ignored_targets_count_nowhere() -> None:
    targets = torch.tensor([1, -100])
    logits = torch.tensor([[0.0, 9.0], [9.0, 0.0]])
    objective = Classification()
    assert objective.count(targets) == 1
    assert float(objective.loss_sum(logits, targets)) == pytest.approx(
        math.log(1 + math.exp(-9)), rel=1e-3
    )
    tokens = torch.tensor([[1, -100], [-100, -100]])
    assert [NextToken().count(row) for row in tokens] == [1, 0]


def test_the_mean_of_no_losses_is_no_number() -> None:
    """A loss of 0 would be the best there is."""
    nothing = torch.full((1, 2), -100)
    total = float(NextToken().loss_sum(torch.randn(1, 2, 4), nothing))
    assert math.isnan(mean_loss(total, NextToken().count(nothing)))
    assert mean_loss(6.0, 4) == 1.5
