"""Rows of TSV and JSONL, and the errors of malformed files."""

from pathlib import Path

import pytest

from thinpipe.launch.data.rows import find_format, read_rows


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, newline="", encoding="utf-8")
    return path


def test_tsv_columns_by_number_keep_quotes_and_empty_cells(tmp_path: Path) -> None:
    """CoLA's form: no header, an empty third column, single quotation marks."""
    path = _file(tmp_path, "a.tsv", 'gj04\t1\t\tHe said "hi.\r\nks08\t0\t*\tHim is.\r\n\r\n')
    rows = read_rows([path], "tsv", header=False)
    assert [(row.text(3), row.value(1)) for row in rows] == [
        ('He said "hi.', "1"),
        ("Him is.", "0"),
    ]
    assert rows[1].where == f"{path}:2"


def test_tsv_header_names_columns_of_its_file(tmp_path: Path) -> None:
    one = _file(tmp_path, "a.tsv", "label\ttext\n1\tyes\n")
    two = _file(tmp_path, "b.tsv", "text\tlabel\nno\t0\n")
    rows = read_rows([one, two], "tsv", header=True)
    assert [(row.text("text"), row.value("label")) for row in rows] == [("yes", "1"), ("no", "0")]


def test_jsonl_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.jsonl", '\ufeff{"a": "one\u2028two"}\n\n{"a": "three"}')
    rows = read_rows([path], "jsonl", header=True)
    assert [row.text("a") for row in rows] == ["one\u2028two", "three"]
    assert rows[1].where.endswith("a.jsonl:3")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "x\ty\n1\t2\t3\n", r"a.tsv:2: 3 columns where the first line has 2"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a.jsonl:2: not JSON"),
        ("a.jsonl", "[1]\n", r"a.jsonl:1: not a JSON object"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = _file(tmp_path, name, content)
    with pytest.raises(ValueError, match=message):
        read_rows([path], "tsv" if name.endswith("tsv") else "jsonl", header=True)


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(ValueError, match=r"a.tsv: not UTF-8 .*; convert it"):
        read_rows([path], "tsv", header=True)


def test_missing_fields_and_values_that_are_not_text_are_named(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.jsonl", '{"a": null, "b": 3, "c": " "}\n')
    (row,) = read_rows([path], "jsonl", header=True)
    for field, message in (
        ("a", r"a.jsonl:1: field 'a' is null"),
        ("d", r"a.jsonl:1: no field 'd' among \['a', 'b', 'c'\]"),
        ("b", r"a.jsonl:1: field 'b' = 3: int, not text; correct the row or the field's name"),
        ("c", r"field 'c' = ' ': blank"),
    ):
        with pytest.raises(ValueError, match=message):
            row.text(field)


def test_an_unpaired_surrogate_is_named(tmp_path: Path) -> None:
    """JSON can escape one surrogate of a pair; the pair is one character."""
    path = _file(tmp_path, "a.jsonl", r'{"a": "ab\ud800c", "b": "\ud83d\ude00"}')
    (row,) = read_rows([path], "jsonl", header=True)
    assert row.value("b") == "\U0001f600"
    with pytest.raises(ValueError, match=r"a\.jsonl:1: field 'a' holds '\\ud800' at 2"):
        row.value("a")


def test_suffixes_decide_the_format() -> None:
    def found(*names: str, has_fields: bool = True) -> str:
        return find_format([Path(n) for n in names], source="data.path", has_fields=has_fields)

    assert found("a.tsv", "b.TSV") == "tsv"
    assert found("a.jsonl") == "jsonl"
    assert found("a.txt", "b.py", has_fields=False) == "text"
    with pytest.raises(ValueError, match=r"several formats \(jsonl, text, by their suffixes\)"):
        found("a.jsonl", "b.txt")
    with pytest.raises(
        ValueError, match=r"suffix '.dat' is neither .tsv nor .jsonl; set data.format"
    ):
        found("a.dat")
    with pytest.raises(ValueError, match=r"comma-separated files are not read; write it with tabs"):
        found("a.csv")
