"""Data sets that the package datasets has written or downloads: memory-mapped Arrow files."""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.rows import Row, without_nulls
from thinpipe.launch.host import disk
from thinpipe.launch.host.cache import cache_folder
from thinpipe.launch.host.packages import first_line

HUB = "hf:"
_FORM = "hf:OWNER/NAME[:CONFIG][@REVISION][#SPLIT]"
_NAME = re.compile(
    r"hf:(?P<name>[^:@#]+)(:(?P<config>[^:@#]+))?(@(?P<revision>[^#]+))?(#(?P<split>.+))?"
)
_HELD_OUT = ("validation", "test")  # splits to evaluate on, the first there is


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
        problem = first_line(error)
        raise ValueError(
            f"{what}: cannot be read as a folder of save_to_disk ({problem}); save it again"
        ) from error


def stream_hub(path: str) -> "StreamedRows":
    """The rows of a data set of the hub, downloaded as they are read."""
    name = parse_hub(path, "data.path")
    name = name._replace(split=name.split or "train")
    found = _loaded(name, f"data.path = {path!r}", streaming=True)
    return StreamedRows(found, f"{path} {name.split}")


def _loaded(name: HubName, what: str, *, streaming: bool = False) -> Any:
    """The data set, or its splits by name; downloaded if it is not in the package's own cache."""
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
        raise ValueError(
            f"{what}: cannot be loaded: {first_line(error)}; correct the name, or check the "
            "network (with HF_HUB_OFFLINE=1 only what was downloaded before is used)"
        ) from error


load_hub = functools.cache(_loaded)


class StreamedRows:
    """A data set's stream as rows, which can be returned to."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name, self._number = dataset, name, 0

    def __iter__(self) -> Iterator[Row]:
        for cells in self._dataset:
            self._number += 1
            yield _row(self._name, self._number, cells)

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self._dataset.state_dict(), "row": self._number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._dataset.load_state_dict(state["dataset"])
        self._number = state.get("row", 0)


class SavedRows:
    """The rows of a data set; other columns than wanted ones, which may be images, are not read."""

    def __init__(self, dataset: Any, wanted: Sequence[Field], name: str) -> None:
        self.columns: Sequence[Field] = dataset.column_names
        kept = [field for field in wanted if field in self.columns]
        self._dataset = dataset.select_columns(kept) if kept else dataset
        self.name = name

    def __iter__(self) -> Iterator[Row]:
        for number, cells in enumerate(self._dataset, start=1):
            yield _row(self.name, number, cells)

    def count(self) -> int:
        return len(self._dataset)


def _row(dataset: str, number: int, cells: Mapping[str, Any]) -> Row:
    fields: dict[Field, Any] = {name: without_nulls(value) for name, value in cells.items()}
    return Row(f"{dataset}, row {number}", fields)


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
