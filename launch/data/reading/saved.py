"""Data sets that the package datasets has written or downloads: memory-mapped Arrow files."""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.reading.arrow import Columns
from thinpipe.launch.data.rows import Row, Rows, without_nulls
from thinpipe.launch.host import disk
from thinpipe.launch.host.cache import cache_folder

HUB = "hf:"
_FORM = "hf:OWNER/NAME[:CONFIG][@REVISION][#SPLIT]"
_NAME = re.compile(
    r"hf:(?P<name>[^:@#]+)(:(?P<config>[^:@#]+))?(@(?P<revision>[^#]+))?(#(?P<split>.+))?"
)
_ROW = "thinpipe_row"
_HELD_OUT = ("validation", "test")
"""Splits to evaluate on, the first there is."""


class HubName(NamedTuple):
    """What a path that begins with hf: names."""

    name: str
    config: str | None
    revision: str | None
    split: str | None


def parse_hub(path: str, setting: str) -> HubName:
    """The parts of hf:OWNER/NAME[:CONFIG][@REVISION][#SPLIT].

    Raises:
        ValueError: it is not of that form.
    """
    found = _NAME.fullmatch(path)
    if found is None:
        raise ValueError(
            f"{setting} = {path!r}: not of the form {_FORM}; write for example "
            "hf:Salesforce/wikitext:wikitext-2-raw-v1"
        )
    name = found["name"]
    if name.count("/") > 1 and not Path(name).is_dir():
        first, _, config = name.rpartition("/")
        raise ValueError(
            f"{setting} = {path!r}: a data set has the name OWNER/NAME; write hf:{first}:{config} "
            "if the last part is its configuration"
        )
    return HubName(**found.groupdict())


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def load_saved(folder: Path, what: str) -> Any:
    """The data set of a folder that `save_to_disk` wrote, or its splits by name.

    Raises:
        ValueError: it is damaged.
    """
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except Exception as error:  # of many kinds
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{what}: cannot be read as a folder of save_to_disk ({first}); save it again"
        ) from error


@functools.cache
def load_hub(name: HubName, what: str) -> Any:
    """The data set, or its splits by name; downloaded if it is not in the package's own cache.

    Raises:
        ValueError: it cannot be had.
    """
    return _loaded(name, what)


def stream_hub(path: str, fields: Sequence[Field]) -> "StreamedRows":
    """The rows of a data set of the hub, downloaded as they are read.

    Raises:
        ValueError: it cannot be had, or lacks a field.
    """
    name = parse_hub(path, "data.path")
    name = name._replace(split=name.split or "train")
    found = _loaded(name, f"data.path = {path!r}", streaming=True)
    return StreamedRows(found, fields, f"{path} {name.split}")


def _loaded(name: HubName, what: str, *, streaming: bool = False) -> Any:
    from datasets import load_dataset
    from datasets.config import HF_DATASETS_CACHE

    cache = Path(HF_DATASETS_CACHE)
    usable = cache.is_absolute() and os.access(disk.existing(cache), os.W_OK)
    try:
        return load_dataset(
            name.name,
            name.config,
            revision=name.revision,
            split=name.split,
            streaming=streaming,
            # a user without a home has no cache of the package's own
            cache_dir=None if usable else str(cache_folder() / "datasets"),
        )
    except Exception as error:  # of many kinds, for a missing name, network or configuration
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{what}: cannot be loaded: {first}; correct the name, or check the network (with "
            "HF_HUB_OFFLINE=1 only what was downloaded before is used)"
        ) from error


class StreamedRows:
    """A data set's stream as rows, which can be returned to."""

    def __init__(self, dataset: Any, fields: Sequence[Field], name: str) -> None:
        self._dataset, self._fields, self._name = dataset, fields, name
        self._parser, self._row = _Parser(name), 0

    def __iter__(self) -> Iterator[Row]:
        for columns in self._dataset:
            self._row += 1
            cells = {**columns, _ROW: self._row}
            yield Row(self._parser.where(cells), self._parser.fields(cells))

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self._dataset.state_dict(), "row": self._row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._dataset.load_state_dict(state["dataset"])
        self._row = state.get("row", 0)


def chosen_splits(found: Any, what: str) -> tuple[Any, Any | None]:
    """What to train on, and what to evaluate on if there is a split for it.

    Raises:
        ValueError: several splits, and none is called train.
    """
    if not isinstance(found, Mapping):
        return found, None
    if "train" not in found:
        raise ValueError(
            f"{what}: has no split 'train', but {', '.join(found)}; name one of them "
            f"({_FORM}, or its folder)"
        )
    held_out = next((found[name] for name in _HELD_OUT if name in found), None)
    return found["train"], held_out


def key_parts(dataset: Any) -> Sequence[object]:
    """What tells a data set from others: its files, and how many rows of them it has."""
    files = [Path(file["filename"]) for file in dataset.cache_files]
    sizes = [file.stat().st_size for file in files]
    return [*map(str, files), *sizes, dataset.num_rows, str(dataset.split)]


def rows_of(dataset: Any, columns: Columns, name: str) -> Rows:
    """Its rows; other columns, which may be images, are not looked at.

    Raises:
        ValueError: there is no such column.
    """
    fields, optional = columns
    for field in fields:
        if field not in dataset.column_names:
            raise ValueError(
                f"{name}: no field {field!r} among {dataset.column_names}; correct the field's "
                "name in [data]"
            )
    kept = [*fields, *(field for field in optional if field in dataset.column_names)]
    chosen = dataset.select_columns(kept) if fields else dataset
    return Rows(_Table(chosen), _Parser(name))


class _Table:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def columns(self, start: int, stop: int) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = self._dataset[start:stop]
        return found | {_ROW: list(range(start + 1, stop + 1))}

    def nbytes(self, start: int, stop: int) -> int:
        data = self._dataset.data
        return int(data.nbytes / max(1, data.num_rows) * (stop - start))


class _Parser:
    def __init__(self, name: str) -> None:
        self._name = name

    def where(self, columns: Mapping[str, Any]) -> str:
        return f"{self._name}, row {columns[_ROW]}"

    def fields(self, columns: Mapping[str, Any]) -> Mapping[Field, Any]:
        return {name: without_nulls(value) for name, value in columns.items() if name != _ROW}
