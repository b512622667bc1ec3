"""What a setting names as data: rows or running text, and a digest of its content."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from typing import Any

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.reading import saved
from thinpipe.launch.data.reading.digests import digest_of
from thinpipe.launch.data.reading.files import find_files
from thinpipe.launch.data.reading.kinds import Form, Kind, form_of
from thinpipe.launch.data.reading.records import FileRows, with_columns
from thinpipe.launch.data.reading.text import FileTexts, RowTexts, Texts
from thinpipe.launch.data.rows import Row, Rows
from thinpipe.launch.data.tokens.store import key_of
from thinpipe.pipeline.models.paths import user_path

_FAMILIES = ({"text"}, {"jsonl", "json"}, {"csv", "tsv"}, {"parquet", "arrow"})
"""Kinds that may stand side by side."""
_LOOKED_AT = 100  # rows in which a field has to be once; else its name is wrong, not the rows


@dataclass(frozen=True)
class Source:
    """Data of one setting. `what` quotes it, `key` is a digest of its content."""

    what: str
    key: str
    nbytes: int
    forms: tuple[Form, ...] = ()
    all_rows: Rows | None = None
    """None of text without rows."""
    held_out: "Source | None" = None
    """What it brings to evaluate on."""
    is_one_document: bool = False
    """Whether rows that follow each other belong together: then the last ones are held out."""

    @property
    def is_text(self) -> bool:
        return self.all_rows is None

    def rows(self, fields: Sequence[Field]) -> Rows:
        """Its rows.

        Raises:
            ValueError: it has none, or none has one of the fields.
        """
        rows = self.all_rows
        assert rows is not None, "asked of rows alone"
        for field in fields:
            if rows.columns and str(field) not in rows.columns:
                raise ValueError(
                    f"{rows.name}: no field {field!r} among {list(rows.columns)}; correct the "
                    "field's name in [data]"
                )
        check_fields(rows, fields, self.what)
        return rows

    def texts(self, field: Field, *, lines: bool) -> Texts:
        """Its running text, of one field if it has rows; with `lines` a row is a line at least."""
        if self.is_text:
            return FileTexts(self.forms)
        return RowTexts(self.rows([field]), field, lines=lines)


def check_fields(rows: Iterable[Row], fields: Sequence[Field], what: str) -> None:
    """Check that the first rows have each field once.

    Raises:
        ValueError: they do not, or there are none.
    """
    first = [*islice(rows, _LOOKED_AT)]
    if not first:
        raise ValueError(f"{what}: no rows; name a file that has some")
    read = next((row for row in first if row.problem is None), first[0])
    for field in fields:
        if any(field in row.fields for row in first):
            continue
        if read.problem is not None:
            raise ValueError(f"{read.where}: {read.problem}; correct or remove it")
        among = f"among {list(read.fields)}" if read.fields else "in an empty record"
        raise ValueError(
            f"{read.where}: no field {field!r} {among}; correct the row or the field's name in "
            "[data]"
        )


def source_of(config: DataConfig, path: str | None, setting: str) -> Source:
    """What a `data.path` or the like names; without a path, Python's standard library."""
    what, fields = f"{setting} = {path!r}", config.fields
    kind = None if config.format == "auto" else config.format
    wanted = [*fields, *config.optional_fields]
    dataset = _dataset(path, setting)
    if dataset is not None:
        return _of_dataset(dataset, wanted, what, str(path))
    forms = _forms(path, setting, kind, header=not _numbered(fields))
    _check(forms, fields, what)
    key = key_of(
        *([str(form.path.resolve()), *astuple(form)[1:], digest_of(form.path)] for form in forms)
    )
    nbytes = sum(form.path.stat().st_size for form in forms)
    rows = None if forms[0].kind == "text" else FileRows(forms, wanted)
    return Source(what, key, nbytes, tuple(forms), rows)


def first_rows(path: str, setting: str) -> list[Row] | None:
    """The first rows of what a path names, with all their fields; None if it is text."""
    what = f"{setting} = {path!r}"
    dataset = _dataset(path, setting)
    if dataset is not None:
        training, _ = saved.chosen_splits(dataset, what)
        return [*islice(saved.SavedRows(training, (), path), _LOOKED_AT)]
    forms = _forms(path, setting, None, header=True)
    _check_alike(forms, what)
    return None if forms[0].kind == "text" else [*islice(FileRows(forms), _LOOKED_AT)]


def _forms(path: str | None, setting: str, kind: Kind | None, *, header: bool) -> list[Form]:
    files = find_files(path, setting)
    if path is None:
        return [Form(file, "text") for file in files]
    found = [form_of(file, kind, header=header) for file in files]
    return [with_columns(form) if form.kind in ("parquet", "arrow") else form for form in found]


def _dataset(path: str | None, setting: str) -> Any | None:
    """What the package datasets loads for a path; None if it names files."""
    what = f"{setting} = {path!r}"
    if path is not None and path.startswith(saved.HUB):
        return saved.load_hub(saved.parse_hub(path, setting), what)
    folder = user_path(path or "")
    return saved.load_saved(folder, what) if path and saved.is_saved(folder) else None


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


def _numbered(fields: Sequence[Field]) -> bool:
    return any(isinstance(field, int) for field in fields)


def _of_dataset(found: Any, wanted: Sequence[Field], what: str, name: str) -> Source:
    training, held_out = saved.chosen_splits(found, what)
    if not wanted:
        raise ValueError(
            f"{what}: rows have fields ({', '.join(training.column_names)}); name them in "
            "data.text_field or in data.prompt_field and data.response_field"
        )

    def source(part: Any, rest: Source | None) -> Source:
        rows = saved.SavedRows(part, wanted, f"{name} {part.split}" if part.split else name)
        key = key_of(*saved.key_parts(part))
        return Source(what, key, int(part.data.nbytes), (), rows, rest, is_one_document=True)

    return source(training, None if held_out is None else source(held_out, None))
