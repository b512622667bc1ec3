"""What an evaluation measures besides the loss, from numbers that add up over all ranks.

Only the last stage sees outputs. Each of its ranks keeps a metric's tally, never the outputs; the
tallies are added (or, for `spearman`, laid end to end) once the evaluation is over.

Axes: N answers that count, C classes or labels, K numbers of a tally.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from thinpipe.pipeline.batch import IGNORED_TARGET
from thinpipe.pipeline.loss import mean_loss


class Metric(Protocol):
    """One number of an evaluation."""

    def tally(self, outputs: Any, targets: Any) -> Tensor:
        """What is added up over microbatches, batches and ranks: float64 [K], K always the same.

        A metric that needs every answer returns rows [N, K], which are laid end to end.
        """

    def value(self, tally: Tensor) -> float:
        """The number that follows from the whole tally."""


class _Answers(NamedTuple):
    """Classes (or labels, with a second axis) answered and true, and which of them count."""

    answered: Tensor
    true: Tensor
    known: Tensor
    classes: int

    @property
    def are_labels(self) -> bool:
        return self.true.ndim == 2


def _answers(outputs: Any, targets: Any) -> _Answers:
    """Class of the greatest logit, one axis more than targets; or labels, of as many as targets.

    A label is answered where its logit is positive, and true where its target is above one half.
    """
    logits, wanted = _tensors(outputs, targets)
    if logits.ndim == wanted.ndim + 1:
        known = wanted.flatten() != IGNORED_TARGET
        return _Answers(
            logits.argmax(-1).flatten()[known], wanted.flatten()[known], known, logits.shape[-1]
        )
    labels = logits.shape[-1] if logits.ndim > 1 else 1
    logits, wanted = logits.reshape(-1, labels), wanted.reshape(-1, labels)
    return _Answers(logits > 0, wanted > 0.5, wanted >= 0, labels)


class Accuracy:
    """Share of right answers; with several labels per sample, of samples with all of them right."""

    def tally(self, outputs: Any, targets: Any) -> Tensor:
        found = _answers(outputs, targets)
        right = found.answered == found.true
        if found.are_labels:
            some = found.known.any(-1)
            right = (right | ~found.known).all(-1)[some]
        return torch.tensor([int(right.sum()), len(right)], dtype=torch.float64)

    def value(self, tally: Tensor) -> float:
        return mean_loss(*tally.tolist())


def _class_counts(found: _Answers) -> Tensor:
    """How often each class is true, is answered, and both [3 * C]."""
    if found.are_labels:
        true, answered = found.true & found.known, found.answered & found.known
        sums = [true.sum(0), answered.sum(0), (true & answered).sum(0)]
    else:
        each = (found.true, found.answered, found.true[found.answered == found.true])
        sums = [torch.bincount(classes, minlength=found.classes) for classes in each]
    return torch.cat(sums).double().cpu()


class F1:
    """F1 of class 1 of two; the mean over more classes; over all labels of several per sample."""

    def tally(self, outputs: Any, targets: Any) -> Tensor:
        found = _answers(outputs, targets)
        kind = torch.tensor([float(found.are_labels), 0.0], dtype=torch.float64)
        return torch.cat([kind, _class_counts(found)])

    def value(self, tally: Tensor) -> float:
        true_C, answered_C, both_C = tally[2:].view(3, -1)
        if tally[0] > 0:  # of labels
            true_C, answered_C, both_C = (one.sum().view(1) for one in (true_C, answered_C, both_C))
        elif len(true_C) == 2:
            true_C, answered_C, both_C = true_C[1:], answered_C[1:], both_C[1:]
        each_C = 2 * both_C / (true_C + answered_C).clamp(min=1)  # 0 where it is not defined
        return float(each_C.mean())


class Matthews:
    """R_K statistic (Gorodkin 2004), for two classes Matthews' correlation, -1 to 1.

    It is 0 where it is not defined: when one class is all that occurs or all that is answered.
    """

    def tally(self, outputs: Any, targets: Any) -> Tensor:
        found = _answers(outputs, targets)
        if found.are_labels:
            raise ValueError(
                "matthews: is of one class per sample, and there are several labels; use f1"
            )
        return _class_counts(found)

    def value(self, tally: Tensor) -> float:
        true_C, answered_C, both_C = tally.view(3, -1)
        total = true_C.sum()
        covariance = both_C.sum() * total - true_C @ answered_C
        spread = (total**2 - answered_C @ answered_C) * (total**2 - true_C @ true_C)
        return float(covariance) / math.sqrt(float(spread)) if spread > 0 else 0.0


def _numbers(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Numbers answered and true [N] (float64)."""
    answers, wanted = _tensors(outputs, targets)
    if answers.numel() != wanted.numel():
        raise ValueError(
            f"outputs of shape {list(answers.shape)} for targets of shape {list(wanted.shape)}: "
            "pearson and spearman compare one number with one; use accuracy, f1 or matthews"
        )
    x_N, y_N = answers.flatten().double().cpu(), wanted.flatten().double().cpu()
    known = y_N != IGNORED_TARGET
    return x_N[known], y_N[known]


class Pearson:
    """Correlation of numbers answered and true, -1 to 1; NaN if one of them is constant."""

    def tally(self, outputs: Any, targets: Any) -> Tensor:
        return _products(*_numbers(outputs, targets))

    def value(self, tally: Tensor) -> float:
        count, x, y, _, xx, xy, _, _, yy = tally.tolist()
        if count < 2:
            return math.nan
        spread = (xx - x * x / count) * (yy - y * y / count)
        return (xy - x * y / count) / math.sqrt(spread) if spread > 0 else math.nan


def _products(x_N: Tensor, y_N: Tensor) -> Tensor:
    """Sums of all products of two of 1, x and y [9]."""
    rows_3N = torch.stack([torch.ones_like(x_N), x_N, y_N])
    return (rows_3N @ rows_3N.T).flatten()


class Spearman:
    """Correlation of ranks, -1 to 1. It keeps two numbers (16 bytes) of every sample."""

    def tally(self, outputs: Any, targets: Any) -> Tensor:
        return torch.stack(_numbers(outputs, targets), 1)

    def value(self, tally: Tensor) -> float:
        ranked = [_mean_ranks(column) for column in tally.unbind(1)]
        return Pearson().value(_products(*ranked))


def _mean_ranks(values_N: Tensor) -> Tensor:
    """Ranks from 0; equal values share the mean of theirs."""
    _, which_N, counts = torch.unique(values_N, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0).double() - (counts + 1) / 2
    return ranks[which_N]


class Mean:
    """`function(outputs, targets)` returns a sum and how many it is of, as a loss function does."""

    def __init__(self, function: Callable[[Any, Any], tuple[Any, Any]], name: str) -> None:
        self._function, self._name = function, name

    def tally(self, outputs: Any, targets: Any) -> Tensor:
        found = self._function(outputs, targets)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                f"metric {self._name}: returned {type(found).__name__}; return (sum, number), two "
                "single numbers, or give an object with tally(outputs, targets) and value(tally)"
            )
        return torch.tensor([float(one) for one in found], dtype=torch.float64)

    def value(self, tally: Tensor) -> float:
        return mean_loss(*tally.tolist())


_KINDS: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "f1": F1,
    "matthews": Matthews,
    "pearson": Pearson,
    "spearman": Spearman,
}
PERPLEXITY = "perplexity"
"""exp(loss), which needs no tally of its own."""
NAMES = (*sorted(_KINDS), PERPLEXITY)
LOWER_IS_BETTER = ("loss", PERPLEXITY)


def named_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """The metrics of these names of `NAMES`; `perplexity` needs none."""
    return {name: _KINDS[name]() for name in names if name != PERPLEXITY}


@dataclass
class Measures:
    """The tallies of one evaluation on one rank; of all ranks together once gathered."""

    metrics: Mapping[str, Metric]
    _tallies: dict[str, Tensor] = field(default_factory=dict)

    def add(self, outputs: Any, targets: Any) -> None:
        """Count a microbatch.

        Raises:
            ValueError: a metric cannot take such outputs.
        """
        for name, metric in self.metrics.items():
            self._add(name, metric.tally(outputs, targets).double().cpu())

    def packed(self) -> bytes:
        # clones: safetensors takes no two tensors that share memory
        layout = torch.contiguous_format
        return save({n: tally.clone(memory_format=layout) for n, tally in self._tallies.items()})

    def values(self, packed: Sequence[bytes]) -> dict[str, float]:
        """Every metric of what all ranks packed; NaN where no rank counted anything."""
        self._tallies = {}
        for data in packed:
            for name, tally in load(data).items():
                self._add(name, tally)
        return {
            name: metric.value(self._tallies[name]) if name in self._tallies else math.nan
            for name, metric in self.metrics.items()
        }

    def _add(self, name: str, tally: Tensor) -> None:
        before = self._tallies.get(name)
        if before is None:
            self._tallies[name] = tally
        else:
            self._tallies[name] = torch.cat([before, tally]) if tally.ndim == 2 else before + tally


def _tensors(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        raise ValueError(
            f"outputs are {type(outputs).__name__} and targets {type(targets).__name__}; metrics "
            f"named {', '.join(sorted(_KINDS))} compare two tensors: give a function of your own"
        )
    return outputs, targets.to(outputs.device)
