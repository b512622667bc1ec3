"""Labelled texts, padded: one label per sample.

Axes: N samples, T tokens.
"""

import reprlib
from collections.abc import Sequence

import torch

from thinpipe.launch.data.columns import Field, RowFields
from thinpipe.launch.data.rows import Row
from thinpipe.launch.data.sample_set import ColumnSet
from thinpipe.launch.data.tokenizer import Tokenizer
from thinpipe.pipeline.batch import Batch


def labelled_set(
    rows: Sequence[Row], fields: RowFields, tokenizer: Tokenizer, *, length: int, classes: int
) -> ColumnSet:
    """Texts as sequences of `length` tokens with a mask, longer ones truncated.

    Raises:
        ValueError: a row has no text, or a label that is not one of the `classes`.
    """
    assert fields.text_field is not None, "checked with the config"
    assert fields.label_field is not None, "checked with the config"
    inputs_NT = torch.zeros(len(rows), length, dtype=torch.int32)
    mask_NT = torch.zeros(len(rows), length, dtype=torch.bool)
    labels = []
    truncated = 0
    for number, row in enumerate(rows):
        other = None if fields.pair_field is None else row.text(fields.pair_field)
        tokens = tokenizer.sample(row.text(fields.text_field), other)
        truncated += len(tokens) > length
        tokens = tokens[:length]
        inputs_NT[number, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        mask_NT[number, : len(tokens)] = True
        labels.append(_label(row, fields.label_field, fields.labels, classes))
    notes = []
    if truncated:
        notes.append(
            f"note: {truncated} of {len(rows)} texts are longer than data.sequence_length = "
            f"{length} {tokenizer.unit} and are truncated"
        )
    labels_N = torch.tensor(labels, dtype=torch.int64)
    return ColumnSet(Batch(inputs_NT, labels_N, torch.arange(len(rows)), mask_NT), notes)


def _label(row: Row, field: Field, labels: Sequence[str] | None, classes: int) -> int:
    found = row.value(field)
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
