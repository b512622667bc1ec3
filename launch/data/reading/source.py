"""What a setting names as data: rows or running text, and a digest of its content."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.reading import saved
from thinpipe.launch.data.reading.arrow import (
    FILE,
    JSON,
    PROBLEM,
    ROW,
    Columns,
    Table,
    all_columns,
    copy_nbytes,
    write_table,
)
from thinpipe.launch.data.reading.digests import digest_of
from thinpipe.launch.data.reading.files import find_files
from thinpipe.launch.data.reading.kinds import Form, Kind, form_of
from thinpipe.launch.data.reading.text import FileTexts, RowTexts, Texts
from thinpipe.launch.data.rows import Row, Rows, rows_of_columns, without_nulls
from thinpipe.launch.data.tokens.store import check_room, key_of, obtain

_FAMILIES: tuple[set[Kind], ...] = (
    {"text"},
    {"jsonl", "json"},
    {"csv", "tsv"},
    {"parquet", "arrow"},
)
"""Kinds that may stand side by side."""
_PLACES = (FILE, ROW, PROBLEM)
_LOOKED_AT = 100
"""Rows in which a field has to be once; else its name is wrong, not the rows."""


@dataclass(frozen=True)
class Source:
    """Data of one setting. `what` quotes it, `key` is a digest of its content."""

    what: str
    key: str
    nbytes: int
    forms: tuple[Form, ...] = ()
    open_rows: Callable[[], Rows] | None = None
    held_out: "Source | None" = None
    """What it brings to evaluate on."""
    is_one_document: bool = False
    """Whether rows that follow each other belong together: then the last ones are held out."""

    @property
    def is_text(self) -> bool:
        """Whether it is text without rows."""
        return self.open_rows is None

    def rows(self, fields: Sequence[Field]) -> Rows:
        """Its rows.

        Raises:
            ValueError: it has none, or none has one of the fields.
        """
        assert self.open_rows is not None, "asked of rows alone"
        rows = self.open_rows()
        if not len(rows):
            raise ValueError(f"{self.what}: no rows; name a file that has some")
        first = rows[: min(_LOOKED_AT, len(rows))]
        read = next((row for row in first if row.problem is None), first[0])
        for field in fields:
            if not any(field in row.fields for row in first):
                read.value(field)  # says which there are
        return rows

    def texts(self, field: Field, *, lines: bool) -> Texts:
        """Its running text, of one field if it has rows; with `lines` a row is a line at least."""
        if self.is_text:
            return FileTexts(self.forms)
        return RowTexts(self.rows([field]), field, lines=lines)


def open_source(
    path: str | None,
    setting: str,
    *,
    kind: Kind | None,
    fields: Sequence[Field],
    optional: Sequence[Field] = (),
) -> Source:
    """What a `data.path` or the like names; without a path, Python's standard library.

    Fields that are `optional` are read where rows have them.

    Raises:
        ValueError: there is nothing, or it does not fit `kind` and `fields`.
    """
    what = f"{setting} = {path!r}"
    dataset = _dataset(path, setting)
    if dataset is not None:
        return _of_dataset(dataset, (fields, optional), what, str(path))
    files = find_files(path, setting)
    if path is None:
        forms = [Form(file, "text") for file in files]
    else:
        header = not _numbered(fields)
        forms = [form_of(file, kind, header=header) for file in files]
    _check(forms, fields, what)
    key = key_of(*([*_facts(form), digest_of(form.path)] for form in forms))
    nbytes = sum(form.path.stat().st_size for form in forms)
    if forms[0].kind == "text":
        return Source(what, key, nbytes, tuple(forms))
    return Source(
        what, key, nbytes, tuple(forms), lambda: _rows(forms, (fields, optional), key, what)
    )


def stream_rows(
    source: Source, fields: Sequence[Field], optional: Sequence[Field] = ()
) -> "StreamedFiles":
    """The rows of files as they are read: nothing is kept on disk."""
    return StreamedFiles(source.forms, (fields, optional))


class StreamedFiles:
    """Rows of files, one after the other, from a row that can be returned to."""

    def __init__(self, forms: Sequence[Form], columns: Columns) -> None:
        self._forms, self._columns, self._done = forms, columns, 0
        self._parser = _Parser(forms, numbered=_numbered(columns[0]))

    def __iter__(self) -> Iterator[Row]:
        passed = self._done
        for number, form in enumerate(self._forms):
            for columns in all_columns(form, number, self._columns):
                count = len(columns[ROW])
                if passed >= count:
                    passed -= count
                    continue
                part = {name: values[passed:] for name, values in columns.items()}
                passed = 0
                for row in rows_of_columns(part, self._parser):
                    self._done += 1
                    yield row

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._done = state["done"]


def first_rows(path: str, setting: str, count: int = 100) -> list[Row] | None:
    """The first rows of what a path names, with all their fields; None if it is text.

    Raises:
        ValueError: there is nothing, or it is damaged.
    """
    what = f"{setting} = {path!r}"
    dataset = _dataset(path, setting)
    if dataset is not None:
        return saved.rows_of(saved.chosen_splits(dataset, what)[0], ((), ()), path)[:count]
    forms = [form_of(file, None) for file in find_files(path, setting)]
    _check_alike(forms, what)
    if forms[0].kind == "text":
        return None
    columns = next(all_columns(forms[0]), {})
    return rows_of_columns(columns, _Parser(forms, numbered=False))[:count]


def rows_of(
    forms: Sequence[Form], columns: Mapping[str, Sequence[Any]], fields: Sequence[Field]
) -> list[Row]:
    """Rows of what `all_columns` gives."""
    return rows_of_columns(columns, _Parser(forms, numbered=_numbered(fields)))


def _dataset(path: str | None, setting: str) -> Any | None:
    """What the package datasets loads for a path; None if it names files."""
    what = f"{setting} = {path!r}"
    if path is not None and path.startswith(saved.HUB):
        return saved.load_hub(saved.parse_hub(path, setting), what)
    folder = Path(path or "").expanduser()
    return saved.load_saved(folder, what) if path and saved.is_saved(folder) else None


def _facts(form: Form) -> list[Any]:
    """What decides how a file is read."""
    place = str(form.path.resolve())
    return [place, form.kind, form.compression, form.columns, form.delimiter]


def _check(forms: Sequence[Form], fields: Sequence[Field], what: str) -> None:
    _check_alike(forms, what)
    kind = forms[0].kind
    if kind == "text" and fields:
        raise ValueError(
            f"{what}: text has no fields {list(fields)}; remove them from [data], or set "
            'data.format to what it is, such as "tsv"'
        )
    if kind != "text" and not fields:
        names = f" ({', '.join(forms[0].columns)})" if forms[0].columns else ""
        raise ValueError(
            f"{what}: {kind} has fields{names}; name them in data.text_field or in "
            'data.prompt_field and data.response_field, or set data.format = "text"'
        )
    if kind in ("csv", "tsv") and not any(form.columns for form in forms):
        raise ValueError(f"{what}: no rows; name a file that has some")
    if _numbered(fields) and kind not in ("csv", "tsv"):
        raise ValueError(f"{what}: fields {list(fields)}: {kind} has names, not numbers; use these")


def _check_alike(forms: Sequence[Form], what: str) -> None:
    kinds = {form.kind for form in forms}
    if not any(kinds <= family for family in _FAMILIES):
        examples = {form.kind: form.path.name for form in reversed(forms)}
        listed = ", ".join(f"{kind}: {name}" for kind, name in sorted(examples.items()))
        raise ValueError(
            f"{what}: files of several formats ({listed}); name files of one format, for example "
            'by a glob, or set data.format (with "text" all are read as text)'
        )


def _rows(forms: Sequence[Form], columns: Columns, key: str, what: str) -> Rows:
    fields, optional = columns
    whole = forms[0].kind in ("jsonl", "json")  # records are kept as they are
    kept = None if whole or not fields else (list(fields), list(optional))

    def make(folder: Path) -> None:
        check_room(folder, copy_nbytes(forms), what)
        write_table(forms, kept, folder)

    table = obtain(
        "rows",
        key_of(key, kept),
        Table,
        make,
        what=what,
    )
    return Rows(table, _Parser(forms, numbered=_numbered(fields)))


def _numbered(fields: Sequence[Field]) -> bool:
    return any(isinstance(field, int) for field in fields)


class _Parser:
    """Where a row is, and its fields, from the columns of the table."""

    def __init__(self, forms: Sequence[Form], *, numbered: bool) -> None:
        self._forms, self._numbered = forms, numbered

    def where(self, columns: Mapping[str, Any]) -> str:
        form = self._forms[columns[FILE]]
        return f"{form.path}{':' if form.kind == 'jsonl' else ', row '}{columns[ROW]}"

    def fields(self, columns: Mapping[str, Any]) -> Mapping[Field, Any] | str:
        if JSON in columns:
            return _record(columns[JSON])
        if problem := columns.get(PROBLEM):
            return str(problem)
        own = {name: value for name, value in columns.items() if name not in _PLACES}
        if self._numbered:
            return {int(name): value for name, value in own.items()}
        return {name: without_nulls(value) for name, value in own.items()}


def _record(text: str | None) -> Mapping[Field, Any] | str:
    """The fields of a record of JSON, or what is wrong with it; None is not UTF-8."""
    if text is None:
        return "not UTF-8"
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg})"
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    return found if isinstance(found, dict) else "not a JSON object with fields"


def _of_dataset(found: Any, columns: Columns, what: str, name: str) -> Source:
    """A data set of the package datasets."""
    training, held_out = saved.chosen_splits(found, what)
    if not columns[0]:
        raise ValueError(
            f"{what}: rows have fields ({', '.join(training.column_names)}); name them in "
            "data.text_field or in data.prompt_field and data.response_field"
        )

    def source(part: Any, rest: Source | None) -> Source:
        named = f"{name} {part.split}" if part.split else name
        rows = lambda: saved.rows_of(part, columns, named)  # noqa: E731
        key = key_of(*saved.key_parts(part))
        return Source(what, key, int(part.data.nbytes), (), rows, rest, is_one_document=True)

    return source(training, None if held_out is None else source(held_out, None))
