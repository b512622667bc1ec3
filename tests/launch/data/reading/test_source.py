"""Files of all kinds, packed, damaged, mixed: their rows and text, or what is wrong with them."""

import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.reading import records
from thinpipe.launch.data.reading.source import Source, first_rows, source_of
from thinpipe.launch.data.rows import RowError

ROWS = [{"text": "one, two", "label": "0"}, {"text": 'say "three"\nfour', "label": "1"}]
Maker = Callable[[Path], Path]


def _file(name: str, content: bytes | str) -> Maker:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def _open(path: Path, fields: list[Any], **settings: Any) -> Source:
    named = zip(("text_field", "label_field", "pair_field"), fields, strict=False)
    return source_of(DataConfig(**dict(named), **settings), str(path), "data.path")


def _lines(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _parquet(rows: list[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


def _arrow(rows: list[Any], *, stream: bool) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


CSV = 'text,label\n"one, two",0\n"say ""three""\nfour",1\n'
SEMICOLONS = 'text;label\none, two;0\n"say ""three""\nfour";1\n'
ARRAY = json.dumps(ROWS, indent=2)
zstd = zstandard.compress

FORMS: dict[str, bytes] = {
    "a.jsonl": _lines(ROWS).encode(),
    "a.json": ARRAY.encode(),
    "a.csv": CSV.encode(),
    "a.parquet": _parquet(ROWS),
    "a.arrow": _arrow(ROWS, stream=False),
    "stream.arrow": _arrow(ROWS, stream=True),
}
PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd}
READ: dict[str, Maker] = {
    **{
        f"{name}{suffix}": _file(f"{name}{suffix}", pack(content))
        for name, content in FORMS.items()
        for suffix, pack in PACKED.items()
    },
    "jsonl with a BOM and blank lines": _file("a.jsonl", f"\ufeff\n{_lines(ROWS)}\n\n"),
    "jsonl of Windows": _file("a.jsonl", _lines(ROWS).replace("\n", "\r\n")),
    "jsonl without a name": _file("data", _lines(ROWS)),
    "jsonl named json": _file("a.json", _lines(ROWS)),
    "jsonl named csv": _file("a.csv", _lines(ROWS)),
    "gzip in two members": _file(
        "a.jsonl.gz", b"".join(gzip.compress(_lines([row]).encode()) for row in ROWS)
    ),
    "zstd in two frames": _file("a.jsonl.zst", b"".join(zstd(_lines([r]).encode()) for r in ROWS)),
    "gzip without a name": _file("data.txt", gzip.compress(_lines(ROWS).encode())),
    "json array on one line": _file("a.json", json.dumps(ROWS)),
    "json array named jsonl": _file("a.jsonl", ARRAY),
    "json objects over several lines": _file(
        "a.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)
    ),
    "csv with a BOM": _file("a.csv", f"\ufeff{CSV}"),
    "csv of Windows": _file("a.csv", CSV.replace("1\n", "1\r\n").replace("0\n", "0\r\n")),
    "csv with semicolons": _file("a.csv", SEMICOLONS),
    "parquet without a name": _file("data", _parquet(ROWS)),
}


@pytest.mark.parametrize("name", READ)
def test_rows_are_read(tmp_path: Path, name: str) -> None:
    path = READ[name](tmp_path)
    source = _open(path, ["text", "label"])
    assert not source.is_text
    rows = source.rows(["text", "label"])
    assert rows.count() == 2
    found = [*rows]
    assert [dict(row.fields) for row in found] == ROWS
    assert found[1].where.startswith(str(path))
    assert first_rows(str(path), "data.path") == found


TSV = 'text\tlabel\none, two\t0\nsay "three\t1\n'


@pytest.mark.parametrize("pack", PACKED.values())
def test_tsv_has_no_quotes(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a.tsv").write_bytes(pack(TSV.encode()))
    rows = [*_open(tmp_path / "a.tsv", ["text"]).rows(["text"])]
    assert [row.text("text") for row in rows] == ["one, two", 'say "three']
    assert rows[1].where == f"{tmp_path / 'a.tsv'}, row 2"


def test_tsv_columns_by_number_keep_quotes_and_empty_cells(tmp_path: Path) -> None:
    """CoLA's form: no header, an empty third column, single quotation marks."""
    (tmp_path / "a.tsv").write_text('gj04\t1\t\tHe said "hi.\r\nks08\t0\t*\tHim is.\r\n\r\n')
    source = _open(tmp_path, [3, 1])
    assert [(row.text(3), row.value(1)) for row in source.rows([3, 1])] == [
        ('He said "hi.', "1"),
        ("Him is.", "0"),
    ]


def test_columns_are_those_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("label\ttext\n1\tyes\n")
    (tmp_path / "b.tsv").write_text("text\tlabel\nno\t0\n")
    rows = _open(tmp_path, ["text", "label"]).rows(["text"])
    assert [(row.text("text"), row.value("label")) for row in rows] == [("yes", "1"), ("no", "0")]
    assert [row.where for row in rows] == [
        f"{tmp_path / 'a.tsv'}, row 1",
        f"{tmp_path / 'b.tsv'}, row 1",
    ]


def test_json_lines_end_at_line_feeds_only_and_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"a": "one\u2028two"}\n\n{"a": "three"}', encoding="utf-8")
    rows = [*_open(path, ["a"]).rows(["a"])]
    assert [row.text("a") for row in rows] == ["one\u2028two", "three"]
    assert rows[1].where == f"{path}:3"


def test_records_are_as_they_were_written(tmp_path: Path) -> None:
    """Arrow's own types would give every record all keys, and change numbers to text."""
    rows: list[Any] = [
        {"m": [{"role": "user", "content": "a"}], "x": 1},
        {"m": [{"role": "tool", "content": None, "id": 7}], "x": "1"},
        {"m": "text", "x": 1.5},
        {"m": [], "x": "\ud800"},
    ]
    for name, content in (("a.jsonl", _lines(rows)), ("a.json", json.dumps(rows))):
        (tmp_path / name).write_text(content)
        source = _open(tmp_path / name, ["m", "x"])
        assert [dict(row.fields) for row in source.rows(["m"])] == rows


def test_keys_that_only_other_records_have_are_left_out_of_typed_ones(tmp_path: Path) -> None:
    rows = [{"m": [{"role": "user", "text": "a"}]}, {"m": [{"role": "tool", "id": 7}]}]
    (tmp_path / "a.parquet").write_bytes(_parquet(rows))
    source = _open(tmp_path, ["m"])
    assert [dict(row.fields) for row in source.rows(["m"])] == rows


def test_long_json_arrays_are_read_in_parts(tmp_path: Path) -> None:
    rows = [{"n": number, "text": "é\\" * (number * 10)} for number in range(400)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False), "utf-8")
    source = _open(tmp_path, ["n"])
    assert [row.fields for row in source.rows(["n"])] == rows


TEXT: dict[str, str] = {
    "prose": "Well, yes,\nand no, perhaps,\nor so, I think,\nat least, so.\n" * 3,
    "a template": "{% for x in y %}\n{{ x }}\n{% endfor %}\n",
    "TOML": "[run]\nname = 'a'\n[data]\npath = 'b'\n",
    "Python": "def f(a, b):\n\treturn a\n\n\ndef g(c, d):\n\treturn d\n",
    "C": "{\n  int a[] = {1, 2};\n}\n",
    "one line": "text,label",
    "ID3": "ID3 is an algorithm.\nORC is another thing.\n",
}


@pytest.mark.parametrize("name", TEXT)
def test_text_is_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT[name])
    assert _open(tmp_path, []).is_text
    assert first_rows(str(tmp_path), "data.path") is None


BINARIES: dict[str, tuple[str, bytes]] = {
    "a PNG image": ("a.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"),
    "a JPEG image": ("a.csv", b"\xff\xd8\xff\xe0\0\x10JFIF"),
    "a PDF document": ("a.txt", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n"),
    "a zip archive": ("a.jsonl", b"PK\x03\x04\x14\0\0\0"),
    "a tar archive": ("a.tar.gz", gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar\x0000")),
    "safetensors weights": ("a.bin", (64).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}'),
    "a Python pickle": ("a.pkl", b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c"),
    "an SQLite database": ("a.db", b"SQLite format 3\0\x10\0"),
    "compressed by xz": ("a.jsonl.xz", b"\xfd7zXZ\0\0\x04"),
    "UTF-16 text": ("a.txt", "text".encode("utf-16")),
}


@pytest.mark.parametrize("what", BINARIES)
def test_binaries_are_named_as_what_they_are(tmp_path: Path, what: str) -> None:
    path = tmp_path / BINARIES[what][0]
    path.write_bytes(BINARIES[what][1])
    with pytest.raises(ValueError, match=rf"{path.name}: {what}.*, neither text nor rows"):
        _open(path, [])


LONG = gzip.compress(_lines(ROWS * 50).encode())
WRONG: dict[str, tuple[Maker, str]] = {
    "cut gzip": (_file("a.jsonl.gz", LONG[:-20]), "its compressed data is damaged"),
    "damaged gzip": (_file("a.jsonl.gz", LONG[:30] + b"xxxx" + LONG[34:]), "data is damaged"),
    "cut zstd": (
        _file("a.jsonl.zst", zstd(_lines(ROWS).encode())[:-9]),
        "its compressed data is damaged .*; download it again",
    ),
    "no gzip": (_file("a.jsonl.gz", _lines(ROWS)), "does not begin as .gz does; rename it"),
    "cut parquet": (_file("a.parquet", _parquet(ROWS)[:-9]), "cannot be read as parquet"),
    "no parquet": (_file("a.parquet", "text"), "does not begin as parquet does"),
    "cut arrow": (
        _file("a.arrow", _arrow(ROWS, stream=True)[:-200]),
        "cannot be read as arrow .*; write or download it again",
    ),
    "cut JSON array": (_file("a.json", ARRAY[:-20]), "a.json, row 2: not JSON"),
    "damaged JSON array": (
        _file("a.json", ARRAY.replace('"label": "0"', '"label" "0"') + " " * 99),
        "a.json, row 1: not JSON",
    ),
    "csv in Latin-1": (_file("a.csv", "text,label\ncafé,1\n".encode("latin-1")), "not UTF-8"),
    "csv with a column twice": (_file("a.csv", "text,text\na,b\n"), "two columns .* 'text'"),
    "empty jsonl": (_file("a.jsonl", ""), "no rows; name a file that has some"),
    "empty csv": (_file("a.csv", ""), "no rows; name a file that has some"),
    "csv of a header": (_file("a.csv", "text,label\n"), "no rows; name a file that has some"),
    "no such field": (_file("a.jsonl", '{"body": "a"}\n'), r"no field 'text' among \['body'\]"),
    "no such column": (_file("a.csv", "body,label\na,1\n"), r"no field 'text' among \['body', 'la"),
    "no such field in parquet": (
        _file("a.parquet", _parquet([{"body": "a"}])),
        r"no field 'text' among \['body'\]",
    ),
}  # fmt: skip


LATIN = '{"text": "café"}\n'.encode("latin-1")
WIDE = "text,label\na,1\nb\nc,2,3\nd,4\n"
LATE = (WIDE[:15] + f"{'x' * 200},1\n" * 500).encode() + "café,1\ny,1\n".encode("latin-1")
DAMAGED: dict[str, tuple[Maker, dict[int, str]]] = {
    "no JSON": (_file("a.jsonl", '{"text": \n' + _lines(ROWS)), {1: "not JSON (Expecting value)"}),
    "deep JSON": (_file("a.jsonl", _lines(ROWS) + "[" * 99_999), {3: "not JSON (maximum"}),
    "JSON of other things": (_file("a.jsonl", '{"text": "a"}\n[1]\n'), {2: "not a JSON object"}),
    "JSON array of other things": (_file("a.json", '[{"text": ""}, 1]'), {2: "not a JSON object"}),
    "JSON lines in Latin-1": (_file("a.jsonl", _lines(ROWS).encode() + LATIN), {3: "not UTF-8"}),
    "csv": (
        _file("a.csv", WIDE),
        {2: "the table has 2 columns, and it has 1", 3: "the table has 2 columns, and it has 3"},
    ),
    "csv of no whole row": (_file("a.csv", "text,label\nb\n"), {1: "the table has 2 columns"}),
    "csv in Latin-1, far down": (_file("a.csv", LATE), {502: "not UTF-8"}),
    "csv with another column in Latin-1": (_file("a.csv", "text,label\na,é\n".encode("l1")), {}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_rows_are_told_from_the_others(tmp_path: Path, name: str) -> None:
    make, wrong = DAMAGED[name]
    path = make(tmp_path)
    source = _open(path, ["text"])
    rows = [*(source.all_rows or ())]
    numbers = [int(re.findall(r"\d+", row.where)[-1]) for row in rows]
    assert numbers == list(range(1, len(rows) + 1))
    for number, row in zip(numbers, rows, strict=True):
        if number in wrong:
            assert (row.problem or "").startswith(wrong[number])
            with pytest.raises(RowError, match=re.escape(wrong[number])):
                row.text("text")
        else:
            assert row.problem is None
            assert row.text("text", blank=True) is not None


def test_a_quotation_mark_that_nothing_closes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_CELL_NBYTES", 1000)
    path = _file("a.csv", 'text,label\n"open,1\n' + "x,1\n" * 500)(tmp_path)
    before = csv.field_size_limit()
    with pytest.raises(ValueError, match=r"a.csv: cannot be read as csv \(field larger than"):
        _open(path, ["text"]).rows(["text"])
    csv.field_size_limit(before)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    make, message = WRONG[name]
    path = make(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        list(_open(path, ["text"]).rows(["text"]))
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.csv", CSV, "csv"),
        ("a.txt", "text,label\nw,0\nx,0\ny,1\nz,1\n", "csv"),
        ("a", "text\tlabel\nw\t0\nx\t0\ny\t1\nz\t1\n", "tsv"),
        ("a.txt", _lines(ROWS), "jsonl"),
        ("a.txt", ARRAY, "json"),
        ("a.bin", _parquet(ROWS), "parquet"),
    ],
)
def test_a_table_is_never_running_text(
    tmp_path: Path, name: str, content: str | bytes, kind: str
) -> None:
    path = _file(name, content)(tmp_path)
    with pytest.raises(ValueError, match=rf"{kind} has fields.*name them in data.text_field"):
        _open(path, [])
    assert _open(path, [], format="text").is_text


def test_files_of_several_kinds_are_named(tmp_path: Path) -> None:
    for make in (READ["a.csv"], READ["a.parquet"], _file("notes.txt", "Some notes.\n")):
        make(tmp_path)
    with pytest.raises(ValueError, match=r"several formats \(csv: a.csv, parquet: .*text: notes"):
        _open(tmp_path, ["text"])


def test_the_key_is_that_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(_lines(ROWS))
    key = _open(path, ["text"]).key
    assert _open(path, ["text"]).key == key
    path.write_text(_lines(ROWS).replace("one", "two"))
    assert _open(path, ["text"]).key != key
