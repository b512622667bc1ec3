"""Metrics agree with independent formulas, however samples are spread over ranks."""

import math
from collections.abc import Sequence
from statistics import correlation

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from thinpipe.pipeline.metrics import Mean, Measures, Metric, named_metrics

_labels = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


def logits(answers: Sequence[int], classes: int) -> Tensor:
    return 9.0 * torch.nn.functional.one_hot(torch.tensor(answers), classes)


def measured(
    metrics: dict[str, Metric], outputs: Tensor, targets: Tensor, parts: int = 1
) -> dict[str, float]:
    """As two ranks would that take turns, and a third that has no last stage."""
    ranks = [Measures(metrics) for _ in range(3)]
    pieces = zip(outputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
    for index, (x, y) in enumerate(pieces):
        ranks[index % 2].add(x, y)
    return Measures(metrics).values([rank.packed() for rank in ranks])


@given(_labels, st.integers(1, 5))
def test_of_two_classes_they_are_the_textbooks(pairs: list[tuple[int, int]], parts: int) -> None:
    true, answered = (list(column) for column in zip(*pairs, strict=True))
    metrics = named_metrics(["accuracy", "f1", "matthews"])
    found = measured(metrics, logits(answered, 2), torch.tensor(true), parts)
    tp, tn = pairs.count((1, 1)), pairs.count((0, 0))
    fp, fn = pairs.count((0, 1)), pairs.count((1, 0))
    spread = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    expected = (tp * tn - fp * fn) / spread if spread else 0.0
    assert found["matthews"] == pytest.approx(expected, abs=1e-12)
    assert found["accuracy"] == pytest.approx((tp + tn) / len(pairs))
    assert found["f1"] == pytest.approx(2 * tp / max(2 * tp + fp + fn, 1))


def test_three_classes_perfect_and_always_wrong() -> None:
    targets = torch.tensor([0, 1, 2, 2, 1, 0])
    metrics = named_metrics(["accuracy", "f1", "matthews"])
    right = measured(metrics, logits(targets.tolist(), 3), targets)
    assert right == {"accuracy": 1.0, "f1": 1.0, "matthews": pytest.approx(1.0)}
    wrong = measured(metrics, logits(((targets + 1) % 3).tolist(), 3), targets)
    assert wrong == {"accuracy": 0.0, "f1": 0.0, "matthews": pytest.approx(-0.5)}


def test_f1_of_three_classes_is_the_mean_of_theirs() -> None:
    found = measured(named_metrics(["f1"]), logits([0, 0, 1, 2], 3), torch.tensor([0, 1, 1, 1]), 2)
    assert found["f1"] == pytest.approx((2 / 3 + 2 / 4 + 0.0) / 3)


def test_tokens_and_samples_that_are_ignored_count_nowhere() -> None:
    outputs = logits([1, 0, 1, 1], 2).view(2, 2, 2)
    targets = torch.tensor([[1, -100], [0, -100]])
    found = measured(named_metrics(["accuracy", "f1"]), outputs, targets, 2)
    assert found == {"accuracy": 0.5, "f1": pytest.approx(2 / 3)}
    nothing = measured(named_metrics(["accuracy"]), outputs, torch.full((2, 2), -100))
    assert math.isnan(nothing["accuracy"])


def test_several_labels_of_a_sample() -> None:
    """A sample is right if all its labels are; F1 counts every label."""
    outputs = torch.tensor([[2.0, -1.0, 3.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]])
    targets = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [-100.0, 0.0, 0.0]])
    found = measured(named_metrics(["accuracy", "f1"]), outputs, targets, 3)
    assert found == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx(2 * 3 / (3 + 4))}
    with pytest.raises(ValueError, match="is of one class per sample"):
        measured(named_metrics(["matthews"]), outputs, targets)


_numbers = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=2, max_size=30)


@given(_numbers, st.integers(1, 4))
def test_correlations_are_the_standard_librarys(pairs: list[tuple[int, int]], parts: int) -> None:
    x, y = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs, strict=True))
    found = measured(named_metrics(["pearson", "spearman"]), x[:, None], y, parts)
    if len(set(x.tolist())) == 1 or len(set(y.tolist())) == 1:
        assert all(math.isnan(value) for value in found.values())
        return
    assert found["pearson"] == pytest.approx(correlation(x.tolist(), y.tolist()), abs=1e-9)
    ranks = [
        [sorted(c).index(v) + (c.count(v) - 1) / 2 for v in c] for c in (x.tolist(), y.tolist())
    ]
    assert found["spearman"] == pytest.approx(correlation(*ranks), abs=1e-9)


def test_a_function_of_ones_own_is_averaged_over_all_ranks() -> None:
    def near(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return ((outputs - targets).abs() < 1).sum(), len(targets)

    found = measured({"near": Mean(near, "near")}, torch.arange(6.0), torch.zeros(6), 3)
    assert found == {"near": pytest.approx(1 / 6)}
    with pytest.raises(ValueError, match=r"metric sum: returned float; return \(sum, number\)"):
        Mean(lambda x, y: 1.0, "sum").tally(None, None)  # type: ignore[arg-type, return-value]


def test_what_names_cannot_compare_is_rejected() -> None:
    accuracy = Measures(named_metrics(["accuracy"]))
    with pytest.raises(ValueError, match="give a function of your own"):
        accuracy.add({"logits": torch.zeros(1)}, torch.zeros(1))
    with pytest.raises(ValueError, match="pearson and spearman compare one number with one"):
        Measures(named_metrics(["pearson"])).add(torch.zeros(4, 2), torch.zeros(4))
