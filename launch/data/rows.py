"""Rows of TSV and JSONL files and of data sets: named or numbered fields, and where they are."""

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from thinpipe.launch.data.columns import Field

if TYPE_CHECKING:
    from datasets import Dataset

RecordFormat = Literal["tsv", "jsonl"]
Format = Literal["text"] | RecordFormat

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Surrogates of UTF-16; JSON can hold an unpaired one, UTF-8 cannot."""

_SUFFIXES: Mapping[str, Format] = {".tsv": "tsv", ".jsonl": "jsonl"}


class RowError(ValueError):
    """A row that cannot be used; rows alike share `reason`, the message says where and what."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One record; `where` is its location in error messages."""

    where: str
    fields: Mapping[Field, Any]

    def value(self, field: Field) -> Any:
        """Return a field.

        Raises:
            RowError: it is missing or null, or text with an unpaired surrogate.
        """
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


class Rows(Sequence[Row]):
    """Rows of a memory-mapped Arrow table, read when they are asked for; none stays in RAM."""

    def __init__(
        self,
        table: "Dataset",
        where: Callable[[int], str],
        parse: Callable[[int, Mapping[str, Any]], Mapping[Field, Any]],
    ) -> None:
        """`where(i)` names row i; `parse(i, columns)` makes its fields of what the table holds."""
        self._table, self._where, self._parse = table, where, parse

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
        """All rows from `start` on, in lists of `size`; the last may be shorter."""
        for first in range(start, len(self), size):
            yield self._read(first, min(first + size, len(self)))

    def _read(self, start: int, stop: int) -> list[Row]:
        columns = self._table[start:stop]
        return [
            Row(
                self._where(start + at),
                self._parse(start + at, {name: column[at] for name, column in columns.items()}),
            )
            for at in range(stop - start)
        ]


def find_format(files: Sequence[Path], *, source: str, has_fields: bool) -> Format:
    """The format, by the suffixes.

    Raises:
        ValueError: they differ, or mean plain text although fields are named.
    """
    kinds: set[Format] = {_SUFFIXES.get(file.suffix.lower(), "text") for file in files}
    if len(kinds) > 1:
        raise ValueError(
            f"{source}: files of several formats ({', '.join(sorted(kinds))}, by their suffixes); "
            'name files of one format, or set data.format = "text", "tsv" or "jsonl"'
        )
    (kind,) = kinds
    if kind == "text" and has_fields:
        if files[0].suffix.lower() == ".csv":
            raise ValueError(
                f"{source}: comma-separated files are not read; write it with tabs between fields "
                "(.tsv), or as one JSON object per line (.jsonl)"
            )
        raise ValueError(
            f"{source}: fields are named in [data], but the suffix {files[0].suffix!r} is "
            'neither .tsv nor .jsonl; set data.format = "tsv" or "jsonl"'
        )
    return kind


def read_rows(files: Iterable[Path], kind: RecordFormat, *, header: bool) -> list[Row]:
    """Read every row of every file; `header` says that a TSV file's first line names columns.

    Raises:
        ValueError: a line does not fit the format; the message names file and line.
    """
    read = partial(_tsv, header=header) if kind == "tsv" else _jsonl
    return [row for file in files for row in read(file, _lines(file))]


def rows_of_columns(name: str, columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows of a table that is stored by columns."""
    values = zip(*columns.values(), strict=True)
    return [
        Row(f"{name}, row {number}", dict(zip(columns, row, strict=True)))
        for number, row in enumerate(values)
    ]


_Lines = Iterable[tuple[int, str]]


def _lines(file: Path) -> list[tuple[int, str]]:
    """Numbered lines that are not blank; only line feeds end a line."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 ({error}); convert it") from None
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _jsonl(file: Path, lines: _Lines) -> Iterator[Row]:
    for number, line in lines:
        where = f"{file}:{number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); correct the line") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: not a JSON object; write one object with fields per line")
        yield Row(where, fields)


def _tsv(file: Path, lines: _Lines, *, header: bool) -> Iterator[Row]:
    """Separated by tabs, without quoting: CoLA's sentences contain single quotation marks."""
    names: list[Field] | None = None
    for number, line in lines:
        values = line.split("\t")
        if names is None:
            names = list(values) if header else list(range(len(values)))
            if header:
                continue
        if len(values) != len(names):
            raise ValueError(
                f"{file}:{number}: {len(values)} columns where the first line has "
                f"{len(names)}; separate columns by single tabs"
            )
        yield Row(f"{file}:{number}", dict(zip(names, values, strict=True)))
