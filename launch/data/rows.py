"""Rows of TSV and JSONL files and of data sets: named or numbered fields, and where they are."""

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from thinpipe.launch.data.columns import Field

RecordFormat = Literal["tsv", "jsonl"]
Format = Literal["text"] | RecordFormat

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Surrogates of UTF-16; JSON can hold an unpaired one, UTF-8 cannot."""

_SUFFIXES: Mapping[str, Format] = {".tsv": "tsv", ".jsonl": "jsonl"}


@dataclass(frozen=True)
class Row:
    """One record; `where` is its location in error messages."""

    where: str
    fields: Mapping[Field, Any]

    def value(self, field: Field) -> Any:
        """Return a field.

        Raises:
            ValueError: it is missing or null, or text with an unpaired surrogate.
        """
        found = self.fields.get(field)
        if found is None:
            if field in self.fields:
                raise ValueError(
                    f"{self.where}: field {field!r} is null; correct or remove the row"
                )
            among = f"among {list(self.fields)}" if self.fields else "in an empty record"
            raise ValueError(
                f"{self.where}: no field {field!r} {among}; correct the row or the field's name in "
                "[data]"
            )
        surrogate = _SURROGATE.search(found) if isinstance(found, str) else None
        if surrogate is not None:
            raise ValueError(
                f"{self.where}: field {field!r} holds {surrogate[0]!r} at {surrogate.start()}, an "
                "unpaired surrogate; correct or remove it"
            )
        return found

    def text(self, field: Field, *, blank: bool = False) -> str:
        """Return a field that must be text, and not blank unless that is allowed.

        Raises:
            ValueError: it is something else.
        """
        found = self.value(field)
        if not isinstance(found, str):
            raise ValueError(
                f"{self.where}: field {field!r} = {reprlib.repr(found)}: "
                f"{type(found).__name__}, not text; correct the row or the field's name in [data]"
            )
        if not blank and not found.strip():
            raise ValueError(f"{self.where}: field {field!r} = {found!r}: blank; correct the row")
        return found


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
