"""Samples whose ids mean the same on every peer, in every epoch and at every resume.

Axes: N samples of a set, B samples of a batch, T tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from thinpipe.launch.data.token_file import TokenFile
from thinpipe.pipeline.batch import Batch

Ids = Sequence[int] | Tensor


class SampleSet(Protocol):
    """Samples with ids 0 to N - 1."""

    notes: tuple[str, ...]
    """Notes for the user on how the set was made."""

    def __len__(self) -> int: ...

    def batch(self, ids: Ids) -> Batch:
        """Return samples on the CPU, in the order of `ids`; inputs are int64, and targets, too,
        unless they are numbers to predict.

        Raises:
            ValueError: an id is negative or past the last sample.
        """

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of shape and content: equal if ids mean the same samples on both sides."""


class SequenceSet:
    """Plain text; `tokens` is an integer tensor [N, T + 1], kept, not copied.

    The targets are the inputs shifted by one.
    """

    def __init__(self, tokens: Tensor, notes: Sequence[str] = ()) -> None:
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)}: a set needs [N, T + 1] with T at least 1"
            )
        self._tokens = tokens
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(self, ids: Ids) -> Batch:
        ids_B = checked_ids(ids, len(self))
        tokens = self._tokens[ids_B].to(torch.int64)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), ids_B)

    @cached_property
    def digest(self) -> str:
        return _digest([self._tokens])


class WindowSet:
    """Running text: samples of `length` inputs follow each other in a token file.

    The targets are the inputs shifted by one, so a sample has the first token of the next.
    """

    def __init__(
        self, tokens: TokenFile, length: int, chosen: Tensor | None, notes: Sequence[str] = ()
    ) -> None:
        """`chosen` are the windows that are samples; None: all."""
        self._tokens, self._length, self._chosen = tokens, length, chosen
        self._count = (tokens.size - 1) // length if chosen is None else len(chosen)
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: Ids) -> Batch:
        ids_B = checked_ids(ids, len(self))
        windows_B = ids_B if self._chosen is None else self._chosen[ids_B]
        tokens = torch.stack([self._window(number) for number in windows_B.tolist()])
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), ids_B)

    def _window(self, number: int) -> Tensor:
        start = number * self._length
        tokens = self._tokens.span(start, start + self._length + 1).tokens
        return torch.from_numpy(tokens).to(torch.int64)

    @cached_property
    def digest(self) -> str:
        shape = f"{self._length} {self._count} {self._chosen is None}"
        return hashlib.sha256(f"{shape} {self._tokens.digest}".encode()).hexdigest()


class ColumnSet:
    """Samples stored by column: `columns` has a row per sample in every tensor."""

    def __init__(self, columns: Batch, notes: Sequence[str] = ()) -> None:
        self._columns = columns
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return len(self._columns)

    def batch(self, ids: Ids) -> Batch:
        ids_B = checked_ids(ids, len(self))
        columns = self._columns
        return Batch(
            columns.inputs_BT[ids_B].to(torch.int64),
            _whole_numbers(columns.targets[ids_B]),
            ids_B,
            mask_BT=_rows(columns.mask_BT, ids_B),
            segments_BT=_rows(columns.segments_BT, ids_B),
            prefix_BT=_rows(columns.prefix_BT, ids_B),
            types_BT=_rows(columns.types_BT, ids_B),
        )

    def select(self, indices: Tensor) -> "ColumnSet":
        """Return some of the samples, renumbered from 0."""
        part = self.batch(indices)
        return ColumnSet(replace(part, ids_B=torch.arange(len(part))), self.notes)

    @cached_property
    def digest(self) -> str:
        parts = self._columns
        columns = [parts.inputs_BT, parts.targets, parts.mask_BT]
        types = [] if parts.types_BT is None else [parts.types_BT]
        return _digest([*columns, parts.segments_BT, parts.prefix_BT, *types])


def spread(
    available: int, wanted: int | Literal["all"], *, setting: str, found: str, remedy: str
) -> Tensor | None:
    """Indices of `wanted` samples spread evenly over those available; None for all of them.

    Raises:
        ValueError: more are wanted than available; `found` and `remedy` are put into the message.
    """
    if wanted == "all" or wanted == available:
        return None
    if wanted > available:
        raise ValueError(f"data.{setting} = {wanted}: {found}; use at most {available}, {remedy}")
    return torch.arange(wanted) * available // wanted


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


def _whole_numbers(targets: Tensor) -> Tensor:
    """Classes and tokens as int64; numbers to predict stay what they are."""
    return targets if targets.is_floating_point() else targets.to(torch.int64)


def _rows(column: Tensor | None, ids_B: Tensor) -> Tensor | None:
    return None if column is None else column[ids_B]


def _digest(columns: Sequence[Tensor | None]) -> str:
    digest = hashlib.sha256()
    for column in columns:
        if column is None:
            digest.update(b"none")
            continue
        digest.update(f"{tuple(column.shape)} {column.dtype}".encode())
        for row in column:  # row by row: sequences overlap in memory, a copy would not
            digest.update(row.numpy())
    return digest.hexdigest()
