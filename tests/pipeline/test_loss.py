"""What evaluation says of labels agrees with independent formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.pipeline.loss import Classification, NextToken

_labels = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


def _logits(answers: list[int], classes: int) -> torch.Tensor:
    return 9.0 * torch.nn.functional.one_hot(torch.tensor(answers), classes)


@given(_labels, st.integers(1, 5))
def test_binary_matthews_is_the_textbooks(pairs: list[tuple[int, int]], parts: int) -> None:
    objective = Classification(2)
    true, answered = (list(column) for column in zip(*pairs, strict=True))
    logits, targets = _logits(answered, 2), torch.tensor(true)
    tallies = [
        objective.tally(x, y)
        for x, y in zip(logits.tensor_split(parts), targets.tensor_split(parts), strict=True)
    ]
    found = objective.metrics(torch.stack(tallies).sum(0).tolist())
    tp, tn = pairs.count((1, 1)), pairs.count((0, 0))
    fp, fn = pairs.count((0, 1)), pairs.count((1, 0))
    spread = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    expected = (tp * tn - fp * fn) / spread if spread else 0.0
    assert found["matthews"] == pytest.approx(expected, abs=1e-12)
    assert found["accuracy"] == pytest.approx((tp + tn) / len(pairs))


def test_three_classes_perfect_and_always_wrong() -> None:
    objective = Classification(3)
    targets = torch.tensor([0, 1, 2, 2, 1, 0])
    right = objective.metrics(objective.tally(_logits(targets.tolist(), 3), targets).tolist())
    assert (right["accuracy"], right["matthews"]) == (1.0, pytest.approx(1.0))
    wrong = objective.tally(_logits(((targets + 1) % 3).tolist(), 3), targets)
    assert objective.metrics(wrong.tolist())["matthews"] == pytest.approx(-0.5)


def test_ignored_targets_count_nowhere() -> None:
    targets = torch.tensor([1, -100])
    loss, count, *confusion = Classification(2).tally(_logits([1, 0], 2), targets).tolist()
    assert (count, confusion) == (1, [0, 0, 0, 1])
    assert loss == pytest.approx(math.log(1 + math.exp(-9)), rel=1e-3)
    tokens = torch.tensor([[1, -100], [-100, -100]])
    assert NextToken().count(tokens) == 1
    nothing = NextToken().tally(torch.randn(1, 2, 4), tokens[1:])
    assert NextToken().metrics(nothing.tolist()) == {"loss": 0.0}
