"""The rows of a file, one after the other, in bounded memory.

pyarrow reads Parquet and Arrow. Records of JSON are kept as they are written: as Arrow's own types,
a value of another type or a key that only some records have would be changed.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.reading.kinds import Form, cells_of
from thinpipe.launch.data.reading.opening import blocks, opened, seekable
from thinpipe.launch.data.rows import Row, is_utf8, without_nulls

_CELL_NBYTES = 8 << 20
"""The longest cell of CSV: a quotation mark that nothing closes is noticed there."""
_ROWS = 64  # of Parquet and Arrow at a time: a row may be a whole document
_BEFORE, _BETWEEN = re.compile(r"[\ufeff\s\[]*"), re.compile(r"[\ufeff\s,\]]*")
"""What stands before the first value of an array, and around others."""
_LONGEST_WORD = 16
"""Of JSON's own, escapes included: an error before is none of a value that goes on."""

Record = tuple[int, Mapping[Field, Any] | str]
"""The number of a row in its file, from 1, and its fields or what is wrong with it."""


class FileRows:
    """The rows of files, one file after the other; of tables only `wanted` columns, or all."""

    def __init__(self, forms: Sequence[Form], wanted: Collection[Field] = ()) -> None:
        self._forms, self._wanted = forms, wanted
        self.name = str(forms[0].path)
        names = (name for form in forms for name in form.columns)
        self.columns: Sequence[Field] = [*dict.fromkeys(names)]

    def __iter__(self) -> Iterator[Row]:
        for form in self._forms:
            place = f"{form.path}{':' if form.kind == 'jsonl' else ', row '}"
            for number, found in _records(form, self._wanted):
                where = f"{place}{number}"
                yield Row(where, {}, found) if isinstance(found, str) else Row(where, found)

    def count(self) -> int:
        return sum(1 for _ in self)


def parquet_count(forms: Sequence[Form]) -> int | None:
    """How many rows files of Parquet have, which say it without being read; None of others."""
    if any(form.kind != "parquet" or form.compression for form in forms):
        return None
    from pyarrow.parquet import read_metadata

    return sum(int(read_metadata(form.path).num_rows) for form in forms)


def with_columns(form: Form) -> Form:
    """A file of Parquet or Arrow with the names of its columns."""
    with _reading(form), seekable(form.path, form.compression) as file:
        if form.kind == "parquet":
            from pyarrow.parquet import read_schema

            schema = read_schema(file)
        else:
            schema = _ipc(file)[0]
    return replace(form, columns=tuple(schema.names))


def _records(form: Form, wanted: Collection[Field]) -> Iterator[Record]:
    with _reading(form):
        if form.kind == "jsonl":
            yield from _lines(form)
        elif form.kind == "json":
            yield from _values(form)
        elif form.kind in ("csv", "tsv"):
            yield from _table(form, wanted)
        else:
            yield from _typed(form, wanted)


@contextmanager
def _reading(form: Form) -> Iterator[None]:
    """What goes wrong while a file is read, said of that file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, csv.Error) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{form.path}: cannot be read as {form.kind} ({said}); write or download it again, or "
            "correct data.format"
        ) from None


def _lines(form: Form) -> Iterator[Record]:
    """Only line feeds end a line of JSON; blank ones are no rows."""
    with opened(form.path, form.compression) as file:
        for number, line in enumerate(file, start=1):
            record = line.removesuffix(b"\n")
            record = record.removeprefix(codecs.BOM_UTF8) if number == 1 else record
            if record.strip():
                yield number, _record(record)


def _record(line: bytes) -> Mapping[Field, Any] | str:
    try:
        return _object(json.loads(line.decode()))
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg})"
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"


def _object(found: Any) -> Mapping[Field, Any] | str:
    return found if isinstance(found, dict) else "not a JSON object with fields"


def _values(form: Form) -> Iterator[Record]:
    """The objects of an array, or one after the other, without holding the whole file."""
    decoder, left, between, done = json.JSONDecoder(), "", _BEFORE, 0
    for text in _decoded(form):
        left, at, final = left + text, 0, not text
        while (found := between.match(left, at)) and (at := found.end()) < len(left):
            between = _BETWEEN
            try:
                value, stop = decoder.raw_decode(left, at)
            except json.JSONDecodeError as error:
                cut = "Unterminated" in error.msg or error.pos > len(left) - _LONGEST_WORD
                if cut and not final:
                    break
                raise ValueError(
                    f"{form.path}, row {done + 1}: not JSON ({error}); correct it, or download it "
                    "again"
                ) from None
            if stop == len(left) and not final and not isinstance(value, dict):
                break
            done += 1
            yield done, _object(value)
            at = stop
        left = left[at:]


def _decoded(form: Form) -> Iterator[str]:
    """The text of a file in parts, and an empty one at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for block in blocks(form.path, form.compression):
            if text := decoder.decode(block):
                yield text
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{form.path}: not UTF-8 ({error}); convert it") from None
    yield ""


def _table(form: Form, wanted: Collection[Field]) -> Iterator[Record]:
    """Cells are text; bytes that are not UTF-8 matter where they are wanted."""
    csv.field_size_limit(_CELL_NBYTES)
    numbered = any(isinstance(field, int) for field in wanted)
    names: Sequence[Field] = [*map(int, form.columns)] if numbered else form.columns
    with opened(form.path, form.compression) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        rows = cells_of(text, form.delimiter, quotes=form.kind == "csv")
        if not numbered:
            next(rows, None)
        for number, cells in enumerate(rows, start=1):
            if len(cells) != len(names):
                yield number, f"the table has {len(names)} columns, and it has {len(cells)}"
                continue
            fields = dict(zip(names, cells, strict=True))
            read = all(is_utf8(fields[name]) for name in names if not wanted or name in wanted)
            yield number, fields if read else "not UTF-8"


def _typed(form: Form, wanted: Collection[Field]) -> Iterator[Record]:
    own = [name for name in form.columns if not wanted or name in wanted]
    with seekable(form.path, form.compression) as file:
        if form.kind == "parquet":
            from pyarrow.parquet import ParquetFile

            batches = ParquetFile(file).iter_batches(_ROWS, columns=own)
        else:
            batches = (batch.select(own) for batch in _ipc(file)[1])
        number = 0
        for batch in batches:
            for first in range(0, batch.num_rows, _ROWS):
                for cells in batch.slice(first, _ROWS).to_pylist():
                    number += 1
                    yield number, {name: without_nulls(cell) for name, cell in cells.items()}


def _ipc(file: IO[bytes]) -> tuple[Any, Iterator[Any]]:
    import pyarrow as pa

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if is_file:
        whole = pa.ipc.open_file(pa.PythonFile(file, mode="r"))
        return whole.schema, map(whole.get_batch, range(whole.num_record_batches))
    stream = pa.ipc.open_stream(pa.PythonFile(file, mode="r"))
    return stream.schema, stream
