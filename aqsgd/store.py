"""Where rows of stored bytes are kept: the `Store` contract, and the tiers in memory.

A step asks for rows it announced the step before (`prefetch`), and puts new ones at its end, all
from one thread. Rows lent by `row` are never written to: a new value comes in a row of its own.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
import xxhash
from torch import Tensor


def row_checksum(row: Tensor) -> int:
    """32 bits of the XXH3-64 of a row in host memory; some 20 GB/s."""
    return xxhash.xxh3_64_intdigest(row.numpy().data) & 0xFFFFFFFF


class LostRowError(RuntimeError):
    """A stored row cannot be read back, and it is too late to agree on that with the other end."""


class Store(Protocol):
    """Rows (uint8) by sample."""

    def reserve(self, samples: int) -> None:
        """Take the room for that many rows now; what was dropped before is given back.

        Raises:
            OSError: there is not as much.
        """

    def empty_row(self, nbytes: int) -> Tensor:
        """A row to fill, for `put` or `give_back`."""

    def give_back(self, row: Tensor) -> None:
        """A row from `empty_row` that is not needed."""

    def row(self, sample: int) -> Tensor:
        """The row that was put last; valid until the end of the step.

        Raises:
            LostRowError: it is damaged.
        """

    def put(self, sample: int, row: Tensor) -> None:
        """Keep a row in place of the sample's last one; the store owns it from here on."""

    def drop(self, sample: int) -> None:
        """Forget a sample's row."""

    def prefetch(self, samples: Iterable[int]) -> None:
        """Begin to fetch the rows of the next step."""

    def is_lost(self, sample: int) -> bool:
        """Whether a fetched row turned out to be damaged; waits for its arrival."""

    def checksum(self, sample: int) -> int:
        """Of the row as it was put; 0 where that is not kept at hand."""

    def end_step(self) -> None:
        """The rows lent so far are done with; those prefetched are the next to be asked for."""

    def pack(self, samples: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """All rows end to end in host memory, each sample's place and checksum (int64; -1: lost).

        Valid until the next step.
        """

    def close(self) -> None:
        """Release what is held; the store is not used again."""


class RamStore:
    """Rows in memory; those that others replaced are filled again.

    Rows carry a checksum. Every row of a step is verified once, before the step begins
    (`is_lost`): that reads it once more, at some 20 GB/s.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []
        self._sums: dict[int, int] = {}
        self._checked: dict[int, bool] = {}
        self._checked_before: dict[int, bool] = {}

    def reserve(self, samples: int) -> None:
        """Give back what is spare; rows are made when they are needed."""
        self._spare.clear()

    def empty_row(self, nbytes: int) -> Tensor:
        """A row that was replaced, if there is one: it spares the cost of touching new memory."""
        while self._spare:
            row = self._spare.pop()
            if row.numel() == nbytes:
                return row
        return torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, row: Tensor) -> None:
        self._spare.append(row)

    def row(self, sample: int) -> Tensor:
        return self._rows[sample]

    def put(self, sample: int, row: Tensor) -> None:
        if sample in self._rows:
            self._spare.append(self._rows[sample])
        self._rows[sample], self._sums[sample] = row, row_checksum(row)
        self._verify_again(sample)

    def drop(self, sample: int) -> None:
        self._spare.append(self._rows.pop(sample))
        del self._sums[sample]
        self._verify_again(sample)

    def prefetch(self, samples: Iterable[int]) -> None:
        """Rows are here; those of the step after the next one will be verified again."""
        self._checked_before, self._checked = self._checked, {}

    def is_lost(self, sample: int) -> bool:
        """Whether a bit has changed since the row was put."""
        for known in (self._checked, self._checked_before):
            if sample in known:
                return known[sample]
        lost = row_checksum(self._rows[sample]) != self._sums[sample]
        self._checked[sample] = lost
        return lost

    def checksum(self, sample: int) -> int:
        return self._sums[sample]

    def end_step(self) -> None: ...

    def pack(self, samples: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        rows = [self._rows[sample] for sample in samples]
        packed = torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)
        sums = [self._sums[sample] for sample in samples]
        return packed, torch.arange(len(samples)), torch.tensor(sums, dtype=torch.int64)

    def close(self) -> None: ...

    def _verify_again(self, sample: int) -> None:
        self._checked.pop(sample, None)
        self._checked_before.pop(sample, None)
