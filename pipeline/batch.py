"""Samples as every rank knows them, so that only hidden states cross the links.

Axes: B samples, T tokens.
"""

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

IGNORED_TARGET = -100
"""A target that does not count in the loss."""
PyTree = Any
"""Tensors, or dicts, lists and tuples of them (and None)."""


def moved(tree: PyTree, device: torch.device) -> PyTree:
    """The same on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def split_samples(tree: PyTree, parts: int) -> list[PyTree]:
    """Split all tensors by samples, their first axis, as `Batch.split`."""
    leaves, spec = tree_flatten(tree)
    columns = [
        leaf.tensor_split(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves
    ]
    return [tree_unflatten([column[part] for column in columns], spec) for part in range(parts)]


def take_samples(tree: PyTree, places_B: Tensor) -> PyTree:
    """Some samples of all tensors."""
    return tree_map(lambda leaf: leaf[places_B] if isinstance(leaf, Tensor) else leaf, tree)


@dataclass(frozen=True)
class Samples:
    """The samples of a microbatch, as stage modules with `wants_samples = True` are given them.

    `ids_B` (int64) tells samples apart for the length of a run. `mask_BT` is nonzero at real
    tokens and zero at padding. `segments_BT` numbers the examples packed into a sequence; tokens
    of different numbers do not see each other. `prefix_BT` is nonzero at tokens that see each
    other in both directions, such as those of a prompt. `types_BT` tells the first text of a pair
    from the second. None means: no padding, one example per sequence, no prefix, one type. `given`
    is what a module with a forward of its own is called with.
    """

    ids_B: Tensor
    mask_BT: Tensor | None = None
    segments_BT: Tensor | None = None
    prefix_BT: Tensor | None = None
    types_BT: Tensor | None = None
    given: PyTree = None

    def to(self, device: torch.device) -> Self:
        return replace(self, **moved(vars(self), device))

    @property
    def plain(self) -> bool:
        """Whether a module needs to know nothing: no padding, packing or prefix."""
        return self.mask_BT is None and self.segments_BT is None and self.prefix_BT is None


@dataclass(frozen=True)
class Batch:
    """This replica's part of a step. Every rank of the replica holds the same.

    `targets` is [B, T] for token losses, [B] for one label per sample, [B, C] for several labels
    or numbers; -100 is not counted. Ids must be unique within a step. The rest is as in `Samples`.
    Inputs of a module with a forward of its own, and targets of a loss of one's own, are anything
    whose tensors have samples as their first axis.
    """

    inputs_BT: PyTree
    targets: PyTree
    ids_B: Tensor
    mask_BT: Tensor | None = None
    segments_BT: Tensor | None = None
    prefix_BT: Tensor | None = None
    types_BT: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids_B)

    @property
    def samples(self) -> Samples:
        return Samples(self.ids_B, self.mask_BT, self.segments_BT, self.prefix_BT, self.types_BT)

    def counting(self, count: int) -> Self:
        """The same samples, of which the loss of the first `count` alone is counted."""
        if count == len(self):
            return self
        targets = self.targets.clone()
        targets[count:] = IGNORED_TARGET
        return replace(self, targets=targets)

    def split(self, parts: int) -> list[Self]:
        """Split into consecutive parts, the first ones a sample longer where it does not divide."""
        columns = [split_samples(getattr(self, field.name), parts) for field in fields(self)]
        return [type(self)(*row) for row in zip(*columns, strict=True)]

    def check(self, known_B: Tensor | None) -> None:
        """Check that a training step can take it; `known_B` are the ids it may have, if not any.

        Raises:
            ValueError: it is empty, or holds an id twice, or one that may not be there.
        """
        times = Counter(self.ids_B.tolist())
        if not times:
            raise ValueError("a training step needs at least one sample on every replica and shard")
        twice = sorted(sample for sample, count in times.items() if count > 1)
        if twice:
            raise ValueError(
                f"sample ids {twice} appear twice in a step; activation caches need unique ids"
            )
        if known_B is not None and not bool((own_B := torch.isin(self.ids_B, known_B)).all()):
            raise ValueError(
                f"sample ids {self.ids_B[~own_B].tolist()[:8]} are none of this replica's; samples "
                "keep to one replica, which caches them"
            )
