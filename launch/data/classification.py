"""Labelled texts, padded: one label per sample.

Axes: N samples, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinpipe.launch.data.rows import Field, Row
from thinpipe.launch.data.sample_set import ColumnSet
from thinpipe.launch.data.tokenizer import Tokenizer
from thinpipe.pipeline.batch import Batch


@dataclass(frozen=True)
class LabelFields:
    """Where a row has its text (or two), and its label; `labels` names them, None counts them."""

    text: Field
    pair: Field | None
    label: Field
    labels: Sequence[str] | None


def labelled_set(
    rows: Sequence[Row], fields: LabelFields, tokenizer: Tokenizer, *, length: int, classes: int
) -> ColumnSet:
    """Texts as sequences of `length` tokens with a mask, longer ones cut short.

    Raises:
        ValueError: a row has no text, or a label that is not one of the `classes`.
    """
    inputs_NT = torch.zeros(len(rows), length, dtype=torch.int32)
    mask_NT = torch.zeros(len(rows), length, dtype=torch.bool)
    labels = []
    cut_short = 0
    for number, row in enumerate(rows):
        other = None if fields.pair is None else row.text(fields.pair)
        tokens = tokenizer.sample(row.text(fields.text), other)
        cut_short += len(tokens) > length
        tokens = tokens[:length]
        inputs_NT[number, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        mask_NT[number, : len(tokens)] = True
        labels.append(_label(row, fields, classes))
    notes = []
    if cut_short:
        notes.append(
            f"note: {cut_short} of {len(rows)} texts are longer than data.sequence_length = "
            f"{length} {tokenizer.unit} and are cut short"
        )
    return ColumnSet(Batch(inputs_NT, _targets(labels), torch.arange(len(rows)), mask_NT), notes)


def _targets(labels: Sequence[int]) -> Tensor:
    return torch.tensor(labels, dtype=torch.int64)


def _label(row: Row, fields: LabelFields, classes: int) -> int:
    found = row.value(fields.label)
    where = f"{row.where}: field {fields.label!r} = {found!r}"
    if fields.labels is not None:
        numbers: Mapping[str, int] = {name: i for i, name in enumerate(fields.labels)}
        if str(found) not in numbers:
            raise ValueError(f"{where}: not one of data.labels = {list(fields.labels)}; correct it")
        return numbers[str(found)]
    try:
        number = int(str(found))
    except ValueError:
        raise ValueError(
            f"{where}: not a whole number; name the labels, in order, in data.labels"
        ) from None
    if not 0 <= number < classes:
        raise ValueError(
            f"{where}: model.classes = {classes} leaves labels 0 to {classes - 1}; raise "
            "model.classes or correct the label"
        )
    return number
