"""Weights as differences to what was last gathered.

Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for LLM
Training", NeurIPS 2024. All ranks remember m, the weights that the last step computed with. The
owner of a part sends Q(w - m), and all add what they decode: m <- m + Q(w - m). It does so too, so
m is equal on all ranks bit for bit, and what Q lost is in the next difference: the error of m is
that of one difference, and does not add up. The owner's w itself is never quantized.

Axes: S shards, N values of a parameter that one shard keeps, padding included.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Remembered:
    """m of the parameters of a unit that are quantized, each by its place in the unit.

    Nothing before the first step; after a restart `rows` alone, this rank's, as the others have
    theirs.
    """

    def __init__(self, sizes: Sequence[int], quantized: Sequence[int], shards: int) -> None:
        """`sizes` are N of all parameters, `quantized` the places of those to remember."""
        self._sizes, self._quantized, self._shards = sizes, quantized, shards
        self._value: dict[int, Tensor] = {}
        self.rows: dict[int, Tensor] = {}

    @property
    def empty(self) -> bool:
        return not self._value and not self.rows

    @property
    def tensors(self) -> list[Tensor]:
        """All that is remembered: [S, N] each."""
        return list(self._value.values())

    def row_parts(self, rank: int) -> list[Tensor]:
        """Room for the `rows` of all ranks, end to end; this rank's are in their place."""
        own_N = torch.cat([self.rows[place] for place in self._quantized])
        return [own_N if r == rank else torch.empty_like(own_N) for r in range(self._shards)]

    def keep_parts(self, parts: Sequence[Tensor]) -> None:
        sizes = [len(self.rows[place]) for place in self._quantized]
        columns = zip(*(torch.split(part, sizes) for part in parts), strict=True)
        self._value = {
            place: torch.stack(own) for place, own in zip(self._quantized, columns, strict=True)
        }
        self.rows.clear()

    def subtract(self, part: Tensor, rank: int) -> None:
        """Leave in a rank's part of the unit the differences, where they are to be sent."""
        for place, own_N in enumerate(torch.split(part, list(self._sizes))):
            if place in self._value:
                own_N -= self._value[place][rank]

    def add(self, parts: Sequence[Tensor]) -> None:
        """Add to all ranks' parts what is remembered, and remember the sums."""
        columns = zip(*(torch.split(part, list(self._sizes)) for part in parts), strict=True)
        for place, part_N in enumerate(columns):
            if place in self._value:
                for own_N, value_N in zip(part_N, self._value[place], strict=True):
                    value_N += own_N
                    own_N.copy_(value_N)
            elif place in self._quantized:
                self._value[place] = torch.stack(part_N)

    def state_dict(self, rank: int) -> dict[str, Tensor]:
        rows = {place: value[rank] for place, value in self._value.items()} or self.rows
        return {f"{place}.remembered": row_N for place, row_N in rows.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        names = {place: f"{place}.remembered" for place in self._quantized}
        self._value.clear()
        if all(name in state for name in names.values()):
            self.rows = {place: state[name].clone() for place, name in names.items()}
