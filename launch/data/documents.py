"""What rows become before they are training sequences: documents of tokens.

An encoder turns rows into documents. These are written once into a token file
(`launch/data/token_file.py`) and packed from there (`launch/data/packing.py`).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from thinpipe.launch.data.rows import Row, RowError

Tokens = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Column = Literal["counts", "types", "targets"]


@dataclass(frozen=True)
class Document:
    """Token ids (int32 [n]), and which of them are learnt as targets (bool [n]; None: all).

    A text to classify has `targets` (float64 [classes or numbers]), and `types` of its tokens
    (uint8 [n]) if the model tells some apart. `remark` says what was done to the row to make it
    one, such as cutting it.
    """

    tokens: Tokens
    counts: Flags | None = None
    remark: str | None = None
    types: npt.NDArray[np.uint8] | None = None
    targets: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Rejected:
    """A row that is not trained on: where it is, and a reason that rows alike share."""

    where: str
    reason: str


@dataclass(frozen=True)
class Encoder:
    """Turns rows into documents; the same row always gives the same tokens."""

    key: str
    """A digest of all that decides the tokens: tokenizer files, template, settings."""
    ids: int
    """One more than the highest token id; files use one, two or four bytes a token for it."""
    columns: tuple[Column, ...]
    """What documents have besides tokens."""
    read: Callable[[Row], Document]
    """Raises RowError."""

    def encode(self, row: Row) -> Document | Rejected:
        return document_of(self.read, row)


def document_of(read: Callable[[Row], Document], row: Row) -> Document | Rejected:
    """What `read` makes of a row, or why it raises RowError."""
    try:
        return read(row)
    except RowError as error:
        where = row.where if error.value is None else f"{row.where} has {error.value}"
        return Rejected(where, str(error))


class Documents(Protocol):
    """Documents by number, such as those of a token file or a choice of them."""

    def __len__(self) -> int: ...

    @property
    def lengths(self) -> npt.NDArray[Any]:
        """Tokens of each document, int64 [documents]."""

    def read(self, number: int, start: int = 0, stop: int | None = None) -> Document:
        """Read one from disk, or some of its tokens: those from `start` to `stop` - 1."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex): equal if the numbers mean the same tokens."""


@dataclass(eq=False)
class Listed:
    """Documents in memory: those of a block of a stream."""

    documents: Sequence[Document]

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> npt.NDArray[Any]:
        return np.array([len(document) for document in self.documents], dtype=np.int64)

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for document in self.documents:
            for part in (document.tokens, document.counts, document.types, document.targets):
                content = b"" if part is None else part.tobytes()
                digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()

    def read(self, number: int, start: int = 0, stop: int | None = None) -> Document:
        whole = self.documents[number]
        counts = None if whole.counts is None else whole.counts[start:stop]
        return replace(whole, tokens=whole.tokens[start:stop], counts=counts)


@dataclass(eq=False)
class Chosen:
    """Some of the documents of others, renumbered."""

    documents: Documents
    numbers: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def lengths(self) -> npt.NDArray[Any]:
        return np.asarray(self.documents.lengths[self.numbers])

    def read(self, number: int, start: int = 0, stop: int | None = None) -> Document:
        return self.documents.read(int(self.numbers[number]), start, stop)

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(self.documents.digest.encode())
        digest.update(np.ascontiguousarray(self.numbers, np.int64).tobytes())
        return digest.hexdigest()


class Joined:
    """The documents of several, one after the other."""

    def __init__(self, parts: Sequence[Documents]) -> None:
        self._parts = parts
        self._stops = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._stops[-1])

    @cached_property
    def lengths(self) -> npt.NDArray[Any]:
        return np.concatenate([part.lengths for part in self._parts])

    def read(self, number: int, start: int = 0, stop: int | None = None) -> Document:
        at = int(np.searchsorted(self._stops, number, side="right"))
        own = number - (int(self._stops[at - 1]) if at else 0)
        return self._parts[at].read(own, start, stop)

    @cached_property
    def digest(self) -> str:
        parts = " ".join(part.digest for part in self._parts)
        return hashlib.sha256(parts.encode()).hexdigest()
