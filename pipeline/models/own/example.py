"""A user's functions, and one of the samples that they are for.

Axes: T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from thinpipe.pipeline.batch import Batch, PyTree

SAMPLES = 2
"""In the batch whose shapes are computed: enough to tell the axis of samples from others."""


class Example(NamedTuple):
    """Shape and type of one sample's input and target, on the meta device.

    `inputs` are those of some samples, with values; `longest` is the T of all messages, where that
    is not the example's.
    """

    x: PyTree
    target: PyTree
    inputs: PyTree = None
    longest: int | None = None

    @classmethod
    def of(cls, batch: Batch, longest: int | None = None) -> "Example":
        """From a batch, of which the first sample is the example."""

        x, target = (
            tree_map_only(Tensor, lambda leaf: leaf[0].to("meta"), part)
            for part in (batch.inputs_BT, batch.targets)
        )
        return cls(x, target, batch.inputs_BT, longest)


@dataclass(frozen=True)
class Functions:
    """The user's functions: `make()` is the model; `loss` and `count` are as in `OwnLoss`."""

    make: Callable[[], nn.Module]
    loss: Callable[..., Any] | None = None
    count: Callable[[Tensor], int] | None = None


def samples_like(sample: PyTree) -> PyTree:
    """A batch of samples like this one."""

    return tree_map_only(
        Tensor, lambda leaf: leaf.expand(SAMPLES, *leaf.shape).contiguous(), sample
    )
