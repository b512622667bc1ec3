"""The loss of a model of the user's own.

Axes: B samples.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from thinpipe.pipeline.batch import PyTree, moved

Loss = Callable[[Any, Any], tuple[Tensor, int]]


class OwnLoss:
    """`loss(outputs, targets)` returns the sum of the losses and how many they are.

    Training divides the sum by the number over the whole step, which every rank must know before
    there are outputs. So the number must follow from the targets: from their shape, or from
    `count(targets)` if that is given.
    """

    metrics: tuple[str, ...] = ()

    def __init__(self, loss: Loss, count: Callable[[Any], int] | None, output: Any) -> None:
        """`output` is what the model returns for some samples, on the meta device."""
        self._loss, self._count, self._output = loss, count, output
        self._counts: dict[str, int] = {}

    def loss_sum(self, outputs: Any, targets: Any) -> Tensor:
        """The sum, a scalar in fp32.

        Raises:
            ValueError: the function returned something else.
        """
        found = self._call(outputs, targets)[0]
        if not isinstance(found, Tensor) or found.ndim:
            raise ValueError(
                f"the loss function returned a sum of {_kind(found)}; return (sum, number), the "
                'sum as a scalar tensor, as with reduction="sum"'
            )
        return found.float()

    def count(self, targets: Any) -> int:
        """The number of losses of these targets.

        Raises:
            ValueError: it does not follow from their shape, and there is no `count`.
        """
        if self._count is not None:
            return int(self._count(targets))
        shapes = str(_shapes(targets))
        if shapes not in self._counts:
            self._counts[shapes] = self._count_by_shape(targets)
        return self._counts[shapes]

    def _count_by_shape(self, targets: Any) -> int:
        samples = _shapes(targets)[0][0]
        outputs = tree_map_only(
            Tensor,
            lambda y: torch.empty((samples, *y.shape[1:]), dtype=y.dtype, device="meta"),
            self._output,
        )
        reason = "it returned no whole number"
        try:
            found = self._call(outputs, moved(targets, torch.device("meta")))[1]
            if isinstance(found, int):
                return found
        except Exception as error:  # of any kind: it is not our code
            reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            "every rank has to know how many losses there are before there are outputs, but the "
            f"loss function does not say it for outputs of shape {_listed(outputs)} and targets of "
            f"shape {_listed(targets)} without values ({reason}); give the number as a function of "
            "its own, count(targets): model.count in a run file, count= of Pipeline"
        )

    def _call(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        found = self._loss(outputs, targets)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                f"the loss function returned {_kind(found)}; return (sum, number): the sum of the "
                "losses and how many they are"
            )
        return found


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _listed(tree: PyTree) -> str:
    return ", ".join(str(list(shape)) for shape in _shapes(tree))


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"a tensor of shape {list(value.shape)}" if value.ndim else "a single number"
