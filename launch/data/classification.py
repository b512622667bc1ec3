"""Labelled texts, padded: per sample one class, several labels, or numbers.

Axes: N samples, T tokens, C classes.
"""

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.launch.data.columns import Field, RowFields
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.sample_set import ColumnSet
from thinpipe.launch.data.tokenizer import Tokenizer
from thinpipe.pipeline.batch import IGNORED_TARGET, Batch
from thinpipe.pipeline.models.kind import Problem


@dataclass(frozen=True)
class Labelling:
    """What the model makes of a text: `classes` logits or numbers, for a `problem`.

    `types` is how many types of token it tells apart.
    """

    classes: int = 2
    problem: Problem = "single_label_classification"
    types: int = 1


def labelled_set(
    rows: Sequence[Row],
    fields: RowFields,
    tokenizer: Tokenizer,
    *,
    length: int,
    labelling: Labelling,
) -> ColumnSet:
    """Texts as sequences of `length` tokens with a mask, longer ones truncated.

    Of two texts the longer one loses tokens first; special tokens stay.

    Raises:
        ValueError: a row has no text, or a label that does not fit; `length` has no room for text.
    """
    assert fields.text_field is not None, "checked with the config"
    assert fields.label_field is not None, "checked with the config"
    inputs_NT = torch.zeros(len(rows), length, dtype=torch.int32)
    mask_NT = torch.zeros(len(rows), length, dtype=torch.bool)
    types_NT = torch.zeros(len(rows), length, dtype=torch.uint8)
    truncated = 0
    for number, row in enumerate(rows):
        other = None if fields.pair_field is None else row.text(fields.pair_field)
        fitted = tokenizer.fitted(row.text(fields.text_field), other, length)
        truncated += fitted.truncated
        count = len(fitted.ids)
        inputs_NT[number, :count] = torch.tensor(fitted.ids, dtype=torch.int32)
        mask_NT[number, :count] = True
        types_NT[number, :count] = torch.tensor(fitted.types, dtype=torch.uint8)
    notes = []
    if truncated:
        notes.append(
            f"note: {truncated} of {len(rows)} texts are longer than data.sequence_length = "
            f"{length} {tokenizer.unit} and are truncated"
        )
    columns = Batch(
        inputs_NT,
        _targets(rows, fields.label_field, fields.labels, labelling),
        torch.arange(len(rows)),
        mask_NT,
        types_BT=_types(types_NT, labelling.types),
    )
    return ColumnSet(columns, notes)


def _types(types_NT: Tensor, known: int) -> Tensor | None:
    """Types of tokens for a model that tells some apart."""
    if known == 1 or not types_NT.any():
        return None
    if int(types_NT.max()) >= known:
        raise ValueError(
            f"data.tokenizer: gives tokens of type {int(types_NT.max())}, and the model knows "
            f"types 0 to {known - 1} (its config.json); use the tokenizer that belongs to it"
        )
    return types_NT


def _targets(
    rows: Sequence[Row], field: Field, labels: Sequence[str] | None, labelling: Labelling
) -> Tensor:
    classes = labelling.classes
    if labelling.problem == "regression":
        values = [_numbers(row, field, classes) for row in rows]
        return torch.tensor(values, dtype=torch.float32).view(len(rows), classes)
    if labelling.problem == "multi_label_classification":
        flags_NC = torch.zeros(len(rows), classes)
        for number, row in enumerate(rows):
            flags_NC[number, _several(row, field, labels, classes)] = 1
        return flags_NC
    found = [_class_of(row, field, row.value(field), labels, classes) for row in rows]
    return torch.tensor(found, dtype=torch.int64)


def _numbers(row: Row, field: Field, count: int) -> list[float]:
    """The numbers of a row to predict."""
    found = row.value(field)
    values = found if isinstance(found, list) else [found]
    where = f"{row.where}: field {field!r} = {reprlib.repr(found)}"
    if len(values) != count:
        raise ValueError(
            f"{where}: {len(values)} numbers where model.classes = {count}; make them equal"
        )
    numbers = []
    for value in values:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{where}: not a number, which regression needs; correct the row")
        if number == IGNORED_TARGET:
            raise ValueError(
                f"{where}: {IGNORED_TARGET} stands for a target that is not counted; shift or "
                "scale the numbers"
            )
        numbers.append(number)
    return numbers


def _several(row: Row, field: Field, labels: Sequence[str] | None, classes: int) -> list[int]:
    """The labels of a row that has any number of them: listed, or as one flag per class."""
    found = row.value(field)
    where = f"{row.where}: field {field!r} = {reprlib.repr(found)}"
    if not isinstance(found, list):
        raise ValueError(f"{where}: not a list of labels; write one per row, such as [0, 2] or []")
    if found and all(isinstance(value, bool | float) for value in found):
        if len(found) != classes or any(value not in (0, 1) for value in found):
            raise ValueError(
                f"{where}: not {classes} flags of 0 and 1 (model.classes); correct the row"
            )
        return [number for number, value in enumerate(found) if value]
    numbers = [_class_of(row, field, value, labels, classes) for value in found]
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"{where}: a label is there twice; list each once, or write flags as true and false"
        )
    return numbers


def _class_of(
    row: Row, field: Field, found: object, labels: Sequence[str] | None, classes: int
) -> int:
    if not isinstance(found, str | int):
        raise ValueError(
            f"{row.where}: field {field!r} = {reprlib.repr(found)}: {type(found).__name__}, not "
            "a label; use text or whole numbers"
        )
    name = str(found).lower() if isinstance(found, bool) else str(found)  # as JSON spells it
    where = f"{row.where}: field {field!r} = {name!r}"
    if labels is not None:
        if name not in labels:
            raise ValueError(f"{where}: not one of data.labels = {list(labels)}; correct it")
        return labels.index(name)
    try:
        number = int(name)
    except ValueError:
        raise ValueError(
            f"{where}: not a whole number; name the labels, in order, in data.labels"
        ) from None
    if not 0 <= number < classes:
        raise ValueError(
            f"{where}: model.classes = {classes} allows labels 0 to {classes - 1}; raise "
            "model.classes or correct the label"
        )
    return number
