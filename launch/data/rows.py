"""Rows of files and data sets: named or numbered fields, and where they are."""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

from thinpipe.launch.data.columns import Field

_BATCH_NBYTES = 2 << 20
"""Of rows that are worked on together: a tokenizer takes some hundred times as much memory."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Surrogates of UTF-16; JSON can hold an unpaired one, UTF-8 cannot."""


class RowError(ValueError):
    """A row that cannot be used; rows alike share `reason`, the message says where and what."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One record; `where` is its location in error messages.

    One with a `problem`, such as damaged JSON, has no fields.
    """

    where: str
    fields: Mapping[Field, Any]
    problem: str | None = None

    def value(self, field: Field) -> Any:
        """Return a field.

        Raises:
            RowError: it is missing or null, or text with an unpaired surrogate; or the row has a
                problem.
        """
        if self.problem is not None:
            raise RowError(f"{self.where}: {self.problem}; correct or remove it", self.problem)
        found = self.fields.get(field)
        if found is None:
            if field in self.fields:
                reason = f"field {field!r} is null"
                raise RowError(f"{self.where}: {reason}; correct or remove the row", reason)
            among = f"among {list(self.fields)}" if self.fields else "in an empty record"
            raise RowError(
                f"{self.where}: no field {field!r} {among}; correct the row or the field's name in "
                "[data]",
                f"no field {field!r}",
            )
        surrogate = _SURROGATE.search(found) if isinstance(found, str) else None
        if surrogate is not None:
            raise RowError(
                f"{self.where}: field {field!r} holds {surrogate[0]!r} at {surrogate.start()}, an "
                "unpaired surrogate; correct or remove it",
                f"field {field!r} holds an unpaired surrogate",
            )
        return found

    def text(self, field: Field, *, blank: bool = False) -> str:
        """Return a field that must be text, and not blank unless that is allowed.

        Raises:
            RowError: it is something else.
        """
        found = self.value(field)
        if not isinstance(found, str):
            kind = type(found).__name__
            raise RowError(
                f"{self.where}: field {field!r} = {reprlib.repr(found)}: {kind}, not text; correct "
                "the row or the field's name in [data]",
                f"field {field!r} is {kind}, not text",
            )
        if not blank and not found.strip():
            raise RowError(
                f"{self.where}: field {field!r} = {found!r}: blank; correct the row",
                f"field {field!r} is blank",
            )
        return found


class Table(Protocol):
    """Columns on disk."""

    def __len__(self) -> int: ...

    def columns(self, start: int, stop: int) -> dict[str, list[Any]]:
        """Some rows, by column."""

    def nbytes(self, start: int, stop: int) -> int:
        """About how many bytes they are."""


class Parser(Protocol):
    """What the columns of a table mean."""

    def where(self, columns: Mapping[str, Any]) -> str:
        """How messages call a row."""

    def fields(self, columns: Mapping[str, Any]) -> Mapping[Field, Any] | str:
        """The fields of a row, or what is wrong with it."""


class Rows(Sequence[Row]):
    """Rows of a memory-mapped Arrow table, read when they are asked for; none stays in RAM."""

    def __init__(self, table: Table, parser: Parser) -> None:
        self._table, self._parser = table, parser

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return self._read(start, stop)
            return [self[each] for each in range(start, stop, step)]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._read(index % len(self), index % len(self) + 1)[0]

    def batches(self, size: int, start: int = 0) -> Iterator[list[Row]]:
        """All rows from `start` on, in lists of up to `size`, fewer where rows are long."""
        while start < len(self):
            stop = min(start + size, len(self))
            while stop - start > 1 and self._table.nbytes(start, stop) > _BATCH_NBYTES:
                stop = start + (stop - start) // 2
            yield self._read(start, stop)
            start = stop

    def _read(self, start: int, stop: int) -> list[Row]:
        return rows_of_columns(self._table.columns(start, stop), self._parser)


def rows_of_columns(columns: Mapping[str, Sequence[Any]], parser: Parser) -> list[Row]:
    """Rows of what a table holds by column."""
    cells = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [_row(parser.where(cell), parser.fields(cell)) for cell in cells]


def _row(where: str, found: Mapping[Field, Any] | str) -> Row:
    return Row(where, {}, found) if isinstance(found, str) else Row(where, found)


def without_nulls(value: Any) -> Any:
    """A value without keys that are null: Arrow gives a record of a list all keys of the others."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
