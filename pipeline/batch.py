"""What every rank knows of the samples it works on, so that only hidden states cross the links.

Axes: B samples, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from thinpipe.pipeline.loss import IGNORED_TARGET


@dataclass(frozen=True)
class Samples:
    """The samples of a microbatch, as stage modules with `wants_samples = True` are given them.

    `ids_B` (int64) tells samples apart for the length of a run. `mask_BT` is nonzero at real
    tokens and zero at padding. `segments_BT` numbers the examples packed into a sequence; tokens
    of different numbers do not see each other. `prefix_BT` is nonzero at tokens that see each
    other in both directions, such as those of a prompt. `types_BT` tells the first text of a pair
    from the second. None means: no padding, one example per sequence, no prefix, one type.
    """

    ids_B: Tensor
    mask_BT: Tensor | None = None
    segments_BT: Tensor | None = None
    prefix_BT: Tensor | None = None
    types_BT: Tensor | None = None

    def to(self, device: torch.device) -> Self:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in given.items() if v is not None})

    @property
    def plain(self) -> bool:
        """Whether a module needs to know nothing: no padding, packing or prefix."""
        return self.mask_BT is None and self.segments_BT is None and self.prefix_BT is None


@dataclass(frozen=True)
class Batch:
    """This replica's part of a step. Every rank of the replica holds the same.

    `targets` is [B, T] for token losses, [B] for one label per sample, [B, C] for several labels
    or numbers; -100 is not counted. Ids must be unique within a step. The rest is as in `Samples`.
    """

    inputs_BT: Tensor
    targets: Tensor
    ids_B: Tensor
    mask_BT: Tensor | None = None
    segments_BT: Tensor | None = None
    prefix_BT: Tensor | None = None
    types_BT: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids_B)

    @property
    def samples(self) -> Samples:
        """What stage modules are given."""
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
        columns = [_split(getattr(self, field.name), parts) for field in fields(self)]
        return [type(self)(*row) for row in zip(*columns, strict=True)]


def _split(column: Tensor | None, parts: int) -> Sequence[Tensor | None]:
    return [None] * parts if column is None else column.tensor_split(parts)
