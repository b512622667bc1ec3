"""Tables of any kind as one Arrow file in the cache, which is memory-mapped.

pyarrow reads CSV, TSV, Parquet and Arrow. Records of JSON are kept as they are written: as Arrow's
own types, a value of another type or a key that only some records have would be changed.
"""

import codecs
import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.reading.kinds import Form
from thinpipe.launch.data.reading.opening import blocks, opened, seekable
from thinpipe.launch.data.token_file import DamagedError, check_sizes, write_sizes
from thinpipe.launch.data.tokens.progress import Progress

FILE, ROW, JSON, PROBLEM = (f"thinpipe_{name}" for name in ("file", "row", "json", "problem"))
"""Columns of our own: the number of the file, that of the row in it, a record of JSON, and what is
wrong with a row that could not be read."""
NAME = "rows.arrow"
_BLOCK_NBYTES = 8 << 20
"""Of CSV; the longest row may take as much."""
_ROWS = 256
"""Of Parquet at a time: a row may be a whole document."""
_PACKED = 4
"""How many times as large files are when they are unpacked, roughly."""
_LONGEST_WORD = 16
"""Of JSON's own, escapes included: an error before is none of a value that goes on."""

Columns = tuple[Sequence[Field], Sequence[Field]]
"""Those that are needed, and those that are read where there are some."""
Batch = tuple[Any, Sequence[int]]
"""A record batch of pyarrow, and the number of each of its rows in the file."""


def write_table(forms: Sequence[Form], columns: Columns | None, folder: Path) -> None:
    """Write the rows of all files into a folder, in bounded memory; `columns` are those to keep.

    Raises:
        ValueError: a file is damaged, or files do not agree on their columns.
    """
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    schema = _schema(forms, columns)
    names = [pa.field(FILE, pa.int32()), pa.field(ROW, pa.int64())]
    full = pa.schema([*names, *schema])
    progress = Progress(f"reading {forms[0].path}", sum(form.path.stat().st_size for form in forms))
    done = 0
    with pa.OSFile(str(folder / NAME), "wb") as sink, pa.ipc.new_stream(sink, full) as writer:
        for number, form in enumerate(forms):
            for batch, rows in _batches(form, [field.name for field in schema]):
                places = [pa.array([number] * len(rows), pa.int32()), pa.array(rows, pa.int64())]
                writer.write_batch(pa.record_batch([*places, *_fitted(batch, schema)], schema=full))
                progress.at(done)
            done += form.path.stat().st_size
    write_sizes(folder, [NAME])


def all_columns(
    form: Form, number: int = 0, columns: Columns | None = None
) -> Iterator[dict[str, list[Any]]]:
    """The rows of a file in batches, by column; `number` is that of the file among others.

    `columns` are those to read, as `write_table` does.
    """
    import pyarrow as pa

    for batch, rows in _batches(form, _schema([form], columns).names):
        places = {FILE: [number] * len(rows), ROW: list(rows)}
        yield {**pa.Table.from_batches([batch]).to_pydict(), **places}


def copy_nbytes(forms: Sequence[Form]) -> int:
    """About how many bytes `write_table` writes, of all columns."""
    return sum(map(_unpacked_nbytes, forms))


def _unpacked_nbytes(form: Form) -> int:
    nbytes = form.path.stat().st_size
    if form.compression is not None:
        return nbytes * _PACKED * (1 if form.kind in ("jsonl", "json", "csv", "tsv") else 2)
    if form.kind != "parquet":
        return nbytes
    from pyarrow.parquet import read_metadata

    with _reading(form):
        facts = read_metadata(form.path)
    return sum(int(facts.row_group(at).total_byte_size) for at in range(facts.num_row_groups))


def row_count(forms: Sequence[Form]) -> int | None:
    """How many rows files have, if they say it without being read."""
    if any(form.kind != "parquet" or form.compression for form in forms):
        return None
    from pyarrow.parquet import read_metadata

    return sum(int(read_metadata(form.path).num_rows) for form in forms)


class Table:
    """An Arrow file, mapped; the pages that were read are given back now and then."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError if it is not there or unfinished, DamagedError if it is cut."""
        import pyarrow as pa

        check_sizes(folder)  # a stream that is cut between batches would seem to be over
        with (folder / NAME).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            with pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(self._map))) as stream:
                self.table = stream.read_all()
        except pa.ArrowInvalid as error:
            raise DamagedError(f"{folder / NAME}: {error}") from None

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def columns(self, start: int, stop: int) -> dict[str, list[Any]]:
        """Some rows, by column."""
        part: dict[str, list[Any]] = self.table.slice(start, stop - start).to_pydict()
        self._map.madvise(mmap.MADV_DONTNEED)
        return part

    def nbytes(self, start: int, stop: int) -> int:
        """Bytes of some rows."""
        return int(self.table.slice(start, stop - start).nbytes)


def _schema(forms: Sequence[Form], columns: Columns | None) -> Any:
    import pyarrow as pa

    found = []
    for form in forms:
        with _reading(form):
            found.append(_own_schema(form))
    try:
        schema = pa.unify_schemas(found, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(
            f"{forms[0].path} and the other files do not agree on their columns: {error}; name "
            "files that do in [data]"
        ) from None
    if columns is None or JSON in schema.names:
        return schema
    wanted, optional = ([str(column) for column in part] for part in columns)
    for name in wanted:
        if name not in schema.names:
            theirs = [field for field in schema.names if field != PROBLEM]
            raise ValueError(
                f"{forms[0].path}: no field {name!r} among {theirs}; correct the field's name in "
                "[data]"
            )
    wanted += [name for name in (*optional, PROBLEM) if name in schema.names]
    return pa.schema([schema.field(name) for name in wanted])


def _own_schema(form: Form) -> Any:
    import pyarrow as pa

    if form.kind in ("jsonl", "json"):
        return pa.schema([pa.field(JSON, pa.string())])
    if form.kind in ("csv", "tsv"):
        return pa.schema([pa.field(name, pa.string()) for name in (*form.columns, PROBLEM)])
    with seekable(form.path, form.compression) as file:
        if form.kind == "parquet":
            from pyarrow.parquet import ParquetFile

            return ParquetFile(file).schema_arrow.remove_metadata()
        return _ipc(file)[0].remove_metadata()


def _batches(form: Form, columns: Sequence[str]) -> Iterator[Batch]:
    read = {"jsonl": _lines, "json": _values, "csv": _csv, "tsv": _csv}.get(form.kind, _typed)
    with _reading(form):
        yield from read(form, columns)


@contextmanager
def _reading(form: Form) -> Iterator[None]:
    """What goes wrong while a file is read, said of that file."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        said = " ".join(str(error).split())[:200]
    else:
        return
    raise ValueError(
        f"{form.path}: cannot be read as {form.kind} ({said}); write or download it again"
    )


def _lines(form: Form, _: Sequence[str]) -> Iterator[Batch]:
    """Only line feeds end a line of JSON; blank ones are no rows."""
    left, line = b"", 1
    for block in _with_end(blocks(form.path, form.compression)):
        *lines, left = (left + block).split(b"\n")
        if line == 1 and lines:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        kept = [(line + at, text) for at, text in enumerate(lines) if text.strip()]
        line += len(lines)
        if kept:
            yield _records([text for _, text in kept]), [number for number, _ in kept]


def _with_end(parts: Iterator[bytes]) -> Iterator[bytes]:
    yield from parts
    yield b"\n"


def _records(texts: Sequence[bytes] | Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.record_batch([_text(pa.array(texts, pa.binary()))], names=[JSON])


def _text(column: Any) -> Any:
    """Bytes as text; null where they are not UTF-8."""
    import pyarrow as pa

    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_utf8(cell) for cell in column.to_pylist()], pa.string())


def _utf8(cell: bytes) -> str | None:
    try:
        return cell.decode()
    except UnicodeDecodeError:
        return None


def _values(form: Form, _: Sequence[str]) -> Iterator[Batch]:
    """The objects of an array, or one after the other, without holding the whole file."""
    decoder, left, first, done, final = json.JSONDecoder(), "", True, 0, False
    found: list[str] = []
    for text in _decoded(form):
        left, final = left + text, not text
        while True:
            left = left.lstrip("\ufeff \t\r\n" + ("[" if first else ",]"))
            if not left:
                break
            first = False
            try:
                value, stop = decoder.raw_decode(left)
            except json.JSONDecodeError as error:
                cut = "Unterminated" in error.msg or error.pos > len(left) - _LONGEST_WORD
                if cut and not final:
                    break
                raise ValueError(
                    f"{form.path}, row {done + len(found) + 1}: not JSON ({error}); correct it, or "
                    "download it again"
                ) from None
            if stop == len(left) and not final and not isinstance(value, dict):
                break
            found.append(json.dumps(value))
            left = left[stop:]
        if found:
            yield _records(found), range(done + 1, done + len(found) + 1)
            done, found = done + len(found), []


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


def _csv(form: Form, columns: Sequence[str]) -> Iterator[Batch]:
    """Cells are text; TSV has no quotes, as CoLA's sentences contain single quotation marks."""
    import pyarrow as pa
    from pyarrow import csv

    if not form.columns:
        return
    numbered = list(form.columns) == [str(at) for at in range(len(form.columns))]
    names = {"column_names": list(form.columns)} if numbered else {}
    wrong: dict[int, str] = {}

    def note(row: Any) -> Literal["skip"]:
        cells = f"{row.expected_columns} columns, and it has {row.actual_columns}"
        wrong[row.number - (not numbered)] = f"the table has {cells}"
        return "skip"

    with opened(form.path, form.compression) as file:
        reader = csv.open_csv(
            pa.PythonFile(file, mode="r"),
            read_options=csv.ReadOptions(use_threads=False, block_size=_BLOCK_NBYTES, **names),
            parse_options=csv.ParseOptions(
                delimiter=form.delimiter,
                quote_char=False if form.kind == "tsv" else '"',
                newlines_in_values=form.kind == "csv",
                invalid_row_handler=note,
            ),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(form.columns, pa.binary()),
                include_columns=[name for name in columns if name in form.columns],
                strings_can_be_null=False,
                null_values=[],
            ),
        )
        yield from _with_wrong(reader, reader.schema.names, wrong)


def _with_wrong(
    batches: Iterable[Any], columns: Sequence[str], wrong: dict[int, str]
) -> Iterator[Batch]:
    """Batches of text with the rows' problems; rows of another width, `wrong`, come last."""
    import pyarrow as pa

    done = 0
    for batch in batches:
        texts = [_text(column) for column in batch.columns]
        problems = pa.nulls(batch.num_rows, pa.string())
        if any(column.null_count for column in texts):
            whole = zip(*(column.is_valid().to_pylist() for column in texts), strict=True)
            problems = pa.array([None if all(own) else "not UTF-8" for own in whole], pa.string())
        numbers = list[int]()
        while len(numbers) < batch.num_rows:
            done += 1
            if done not in wrong:
                numbers.append(done)
        yield pa.record_batch([*texts, problems], names=[*columns, PROBLEM]), numbers
    if wrong:
        none = [pa.nulls(len(wrong), pa.string())] * len(columns)
        problems = pa.array([*wrong.values()], pa.string())
        yield pa.record_batch([*none, problems], names=[*columns, PROBLEM]), [*wrong]


def _typed(form: Form, columns: Sequence[str]) -> Iterator[Batch]:
    with seekable(form.path, form.compression) as file:
        if form.kind == "parquet":
            from pyarrow.parquet import ParquetFile

            opened = ParquetFile(file)
            own = [name for name in columns if name in opened.schema_arrow.names]
            yield from _numbered(opened.iter_batches(_ROWS, columns=own))
        else:
            yield from _numbered(_ipc(file)[1])


def _ipc(file: IO[bytes]) -> tuple[Any, Iterator[Any]]:
    """Schema and batches of an Arrow file, or of a stream of Arrow."""
    import pyarrow as pa

    if file.read(6) == b"ARROW1":
        file.seek(0)
        whole = pa.ipc.open_file(pa.PythonFile(file, mode="r"))
        return whole.schema, (whole.get_batch(at) for at in range(whole.num_record_batches))
    file.seek(0)
    stream = pa.ipc.open_stream(pa.PythonFile(file, mode="r"))
    return stream.schema, stream


def _numbered(batches: Any) -> Iterator[Batch]:
    done = 0
    for batch in batches:
        yield batch, range(done + 1, done + batch.num_rows + 1)
        done += batch.num_rows


def _fitted(batch: Any, schema: Any) -> list[Any]:
    """The columns of a batch as the table has them; null where a file lacks one."""
    import pyarrow as pa

    return [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
