"""What kind of data a file holds, by its content and, where that leaves it open, by its name."""

import codecs
import contextlib
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinpipe.launch.data.reading.opening import COMPRESSED, Compression, compression_of, head_of

Kind = Literal["text", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]

_BY_NAME: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_DELIMITERS = ",;\t|"
_ALIKE = 3  # lines of one shape that make a table of what has no table's name
_COLUMN = re.compile(r"[^\W\d][\w .-]{0,39}")
"""A column's name, as opposed to a sentence between commas."""
_BINARIES: tuple[tuple[bytes, int, str], ...] = (
    (b"\x89PNG\r\n", 0, "a PNG image"),
    (b"\xff\xd8\xff", 0, "a JPEG image"),
    (b"GIF8", 0, "a GIF image"),
    (b"WEBP", 8, "a WebP image"),
    (b"WAVE", 8, "a WAV recording"),
    (b"ID3", 0, "an MP3 recording"),
    (b"OggS", 0, "an Ogg recording"),
    (b"fLaC", 0, "a FLAC recording"),
    (b"ftyp", 4, "an MP4 video"),
    (b"%PDF-", 0, "a PDF document"),
    (b"\xd0\xcf\x11\xe0", 0, "an Office document"),
    (b"PK\x03\x04", 0, "a zip archive (as .docx, .xlsx, .npz and PyTorch's .pt are)"),
    (b"ustar", 257, "a tar archive"),
    (b"7z\xbc\xaf\x27\x1c", 0, "a 7z archive"),
    (b"Rar!", 0, "a RAR archive"),
    (b"BZh", 0, "compressed by bzip2"),
    (b"\xfd7zXZ\x00", 0, "compressed by xz"),
    (b"\x04\x22\x4d\x18", 0, "compressed by lz4"),
    (b"\x7fELF", 0, "a compiled program"),
    (b"SQLite format 3", 0, "an SQLite database"),
    (b"\x93NUMPY", 0, "a NumPy array"),
    (b"\x89HDF\r\n", 0, "an HDF5 file"),
    (b"GGUF", 0, "GGUF weights"),
    (b'{"', 8, "safetensors weights"),
    (b"Obj\x01", 0, "an Avro file"),
    (b"ORC", 0, "an ORC file"),
    (b"\xff\xfe", 0, "UTF-16 text"),
    (b"\xfe\xff", 0, "UTF-16 text"),
)
"""How a file begins, at which byte, and what it is then, if it is no clean text."""
_PICKLE = re.compile(rb"\x80[\x02-\x05][\x8a\x95}(\]]")


@dataclass(frozen=True)
class Form:
    """A file, what it holds, and how it is packed. `columns` and `delimiter` are a table's."""

    path: Path
    kind: Kind
    compression: Compression = None
    columns: tuple[str, ...] = ()
    delimiter: str = ","


def form_of(file: Path, chosen: Kind | None, *, header: bool = True) -> Form:
    """What a file holds; `chosen` is the kind that a setting demands.

    Raises:
        ValueError: it is damaged, empty of columns, or a binary that nothing is read from.
    """
    packed = compression_of(file)
    if chosen == "text" and packed is None:
        return Form(file, "text")
    head = head_of(file, packed)
    kind = chosen or _kind(file, head)
    if kind not in ("csv", "tsv"):
        return Form(file, kind, packed)
    text = _decoded(file, head)
    delimiter = "\t" if kind == "tsv" else _delimiter(text)
    first = next(_rows(text, delimiter, quotes=kind == "csv"), [])
    columns = first if header else [str(number) for number in range(len(first))]
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise ValueError(f"{file}: two columns are called {twice[0]!r}; rename one")
    return Form(file, kind, packed, tuple(columns), delimiter)


def _kind(file: Path, head: bytes) -> Kind:
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    binary = _binary(head)
    if binary is not None:
        raise ValueError(
            f"{file}: {binary}, neither text nor rows; name others in [data]{_remedy(binary)}"
        )
    name = _named(file)
    if name in ("parquet", "arrow"):
        raise ValueError(f"{file}: does not begin as {name} does; write or download it again")
    text = head.decode("utf-8-sig", "replace")
    return _json_kind(text) or name or _table_kind(text) or "text"


def _named(file: Path) -> Kind | None:
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() not in COMPRESSED]
    return _BY_NAME.get(suffixes[-1]) if suffixes else None


def _binary(head: bytes) -> str | None:
    if _is_clean(head) and not head.startswith(b"%PDF-"):
        return None
    for begins, at, what in _BINARIES:
        if head[at : at + len(begins)] == begins:
            if what.startswith("safetensors") and int.from_bytes(head[:8], "little") > 100 << 20:
                continue  # the size of its header
            return what
    return "a Python pickle" if _PICKLE.match(head) else None


def _is_clean(head: bytes) -> bool:
    """Whether it is UTF-8, apart from a character cut at its end, without NUL."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _remedy(binary: str) -> str:
    if binary.startswith("compressed"):
        return ", or compress it by gzip or zstd"
    if "text" in binary:
        return ", and write this one as UTF-8"
    return ", for example by a glob"


def _json_kind(text: str) -> Kind | None:
    """JSON begins with an object or with an array of objects; templates and TOML do so in vain."""
    stripped = text.lstrip()
    if stripped.startswith("{"):
        with contextlib.suppress(ValueError):
            json.loads(stripped.partition("\n")[0])
            return "jsonl"
    is_array = stripped.startswith("[")
    inside = stripped[1:].lstrip() if is_array else stripped
    if not inside.startswith("{"):
        return None
    try:
        json.JSONDecoder().raw_decode(inside)
    except ValueError as error:
        return "json" if is_array and "Unterminated" in str(error) else None
    return "json"


def _table_kind(text: str) -> Kind | None:
    """Whether what has no table's name has a table's shape: a header, and rows as wide as it."""
    for delimiter in "\t,;":
        rows = list(_rows(text, delimiter, quotes=delimiter != "\t"))[:-1]  # the last may be cut
        if len(rows) <= _ALIKE or len(rows[0]) < 2:
            continue
        alike = {len(row) for row in rows} == {len(rows[0])}
        named = all(map(_COLUMN.fullmatch, rows[0])) and len({*rows[0]}) == len(rows[0])
        if alike and named:
            return "tsv" if delimiter == "\t" else "csv"
    return None


def _delimiter(text: str) -> str:
    """The one that makes most columns of the first line, of those that make as many of others."""
    best, most = ",", 1
    for delimiter in _DELIMITERS:
        rows = list(_rows(text, delimiter, quotes=True))
        rows = rows[:-1] if len(rows) > 2 else rows
        if rows and len(rows[0]) > most and {len(row) for row in rows} == {len(rows[0])}:
            best, most = delimiter, len(rows[0])
    return best


def cells_of(lines: Iterable[str], delimiter: str, *, quotes: bool) -> Iterator[list[str]]:
    """The rows of a table that are not blank.

    TSV has no quotes, as CoLA's sentences contain single quotation marks.
    """
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    return filter(None, csv.reader(lines, delimiter=delimiter, quoting=quoting))


def _rows(text: str, delimiter: str, *, quotes: bool) -> Iterator[list[str]]:
    with contextlib.suppress(csv.Error):
        yield from cells_of(io.StringIO(text, newline=""), delimiter, quotes=quotes)


def _decoded(file: Path, head: bytes) -> str:
    """The head of a table; a character may be cut at its end."""
    for cut in range(4):
        try:
            return head[: len(head) - cut].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            problem = error
    raise ValueError(f"{file}: not UTF-8 ({problem}); convert it")
