"""Data sets of the Hugging Face hub, read with the optional package datasets."""

from collections.abc import Mapping, Sequence
from typing import Any

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.config import parse_dataset
from thinpipe.launch.data.rows import Row, rows_of_columns
from thinpipe.launch.host.packages import explain


def read_dataset(dataset: str, fields: Sequence[Field]) -> tuple[list[Row], list[Row] | None]:
    """Return rows of the training split, and of the validation or test split if there is one.

    Raises:
        ImportError: the optional package is not installed.
        ValueError: a split lacks a field.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ImportError(
            f"data.dataset = {dataset!r}: {explain(error)}, or set data.path to local text"
        ) from error
    splits: Mapping[str, Any] = load_dataset(*parse_dataset(dataset))
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    found: list[list[Row]] = []
    for split in filter(None, ("train", held_out)):
        known = splits[split].column_names if split in splits else []
        for field in fields:
            if field not in known:
                raise ValueError(
                    f"data.dataset = {dataset!r}: no column {field!r} in a split '{split}' "
                    f"(it has {known}); name others in [data], use another data set or export it "
                    "to a file for data.path"
                )
        columns = {str(field): splits[split][field] for field in fields}
        found.append(rows_of_columns(f"{dataset} {split}", columns))
    return found[0], found[1] if held_out is not None else None
