"""Samples whose ids mean the same on every peer, in every epoch and at every resume.

Axes: B samples of a batch, T tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinpipe.launch.data.documents import Document, Documents
from thinpipe.pipeline.batch import Batch

if TYPE_CHECKING:
    from thinpipe.launch.data.token_file import TokenFile

Ids = Sequence[int] | Tensor


class SampleSet(Protocol):
    """Samples with ids from 0."""

    notes: tuple[str, ...]
    """Notes for the user on how the set was made."""

    def __len__(self) -> int: ...

    def batch(self, ids: Ids) -> Batch:
        """Return samples on the CPU, in the order of `ids`; inputs are int64, and targets, too,
        unless they are numbers to predict.
        """

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of shape and content: equal if ids mean the same samples on both sides."""


class Windows:
    """Running text as documents of `length` + 1 tokens: each has the first token of the next."""

    def __init__(self, tokens: "TokenFile", length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return max(0, self._tokens.size - 1) // self._length

    @property
    def lengths(self) -> npt.NDArray[Any]:
        return np.full(len(self), self._length + 1)

    def read(self, number: int, start: int = 0, stop: int | None = None) -> Document:
        first = number * self._length
        last = first + (self._length + 1 if stop is None else stop)
        return self._tokens.span(first + start, last)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self._length} {self._tokens.digest}".encode()).hexdigest()


@dataclass(eq=False)
class WindowSet:
    """Running text: each document is a sample, whose targets are the inputs shifted by one."""

    documents: Documents
    """They have as many tokens each, at least two."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.documents)

    def batch(self, ids: Ids) -> Batch:
        ids_B = checked_ids(ids, len(self))
        found = [self.documents.read(number).tokens for number in ids_B.tolist()]
        tokens = torch.from_numpy(np.stack(found)).to(torch.int64)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), ids_B)

    @property
    def digest(self) -> str:
        return self.documents.digest


@dataclass(eq=False)
class Counted:
    """The samples of others, of which there are `count`: the first ones, or more than are known."""

    samples: SampleSet
    count: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.count

    def batch(self, ids: Ids) -> Batch:
        return self.samples.batch(ids)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.count} {self.samples.digest}".encode()).hexdigest()


def checked_ids(ids: Ids, count: int) -> Tensor:
    """The ids of samples as int64, 1-d.

    Raises:
        ValueError: one is not of a set of `count`.
    """
    ids_B = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
    wrong = ids_B[(ids_B < 0) | (ids_B >= count)]
    if len(wrong):
        raise ValueError(
            f"sample ids {wrong[:4].tolist()}: the set holds {count} sequences; "
            f"use ids from 0 to {count - 1}"
        )
    return ids_B
