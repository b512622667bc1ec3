"""Labelled texts, padded: per sample one class, several labels, or numbers.

Axes: B samples of a batch, T tokens, C classes or numbers.
"""

import hashlib
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.documents import Document, Documents
from thinpipe.launch.data.rows import Row, RowError
from thinpipe.launch.data.sample_set import Ids, checked_ids
from thinpipe.launch.data.tokenizer import Tokenizer
from thinpipe.pipeline.batch import IGNORED_TARGET, Batch
from thinpipe.pipeline.models.kind import Problem

_ONE_CLASS: Problem = "single_label_classification"
TRUNCATED = "texts truncated to fit data.sequence_length"


@dataclass(frozen=True)
class Labelling:
    """What the model makes of a text: `classes` logits or numbers, for a `problem`.

    `types` is how many types of token it tells apart.
    """

    classes: int = 2
    problem: Problem = _ONE_CLASS
    types: int = 1


@dataclass(eq=False)
class LabelledSet:
    """Texts as sequences of `length` tokens with a mask, read when they are asked for."""

    documents: Documents
    length: int
    labelling: Labelling
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.documents)

    def batch(self, ids: Ids) -> Batch:
        ids_B = checked_ids(ids, len(self))
        inputs_BT = torch.zeros(len(ids_B), self.length, dtype=torch.int64)
        mask_BT = torch.zeros(inputs_BT.shape, dtype=torch.bool)
        types_BT = torch.zeros(inputs_BT.shape, dtype=torch.uint8)
        targets_BC = torch.zeros(len(ids_B), self.labelling.classes)
        for row, number in enumerate(ids_B.tolist()):
            document = self.documents.read(number)
            inputs_BT[row, : len(document)] = torch.from_numpy(document.tokens)
            mask_BT[row, : len(document)] = True
            if document.types is not None:
                types_BT[row, : len(document)] = torch.from_numpy(document.types)
            targets_BC[row] = torch.from_numpy(document.targets)
        is_one = self.labelling.problem == _ONE_CLASS
        targets = targets_BC[:, 0].to(torch.int64) if is_one else targets_BC
        types = types_BT if self.labelling.types > 1 else None
        return Batch(inputs_BT, targets, ids_B, mask_BT, types_BT=types)

    @cached_property
    def digest(self) -> str:
        parts = f"{self.documents.digest} {self.length} {self.labelling}"
        return hashlib.sha256(parts.encode()).hexdigest()


@dataclass(frozen=True)
class LabelledEncoder:
    """Rows as the tokens of one or two texts, and what is to be predicted of them.

    Of two texts the longer one loses tokens first; special tokens stay.
    """

    config: DataConfig
    tokenizer: Tokenizer
    labelling: Labelling

    def encode(self, row: Row) -> Document:
        """Raises ValueError if the length has no room for text, or the model lacks a type."""
        fields = self.config
        assert fields.text_field is not None, "checked with the config"
        assert fields.label_field is not None, "checked with the config"
        text = row.text(fields.text_field)
        other = None if fields.pair_field is None else row.text(fields.pair_field)
        found = row.value(fields.label_field)
        try:
            targets = _targets(found, fields.labels, self.labelling)
        except RowError as error:
            wrong = RowError(f"field {fields.label_field!r} {error}")
            wrong.value = reprlib.repr(found)
            raise wrong from None
        fitted = self.tokenizer.fitted(text, other, fields.sequence_length)
        return Document(
            np.array(fitted.ids, dtype=np.int32),
            remark=TRUNCATED if fitted.truncated else None,
            types=self._types(fitted.types),
            targets=np.array(targets, dtype=np.float64),
        )

    def _types(self, types: Sequence[int]) -> npt.NDArray[np.uint8] | None:
        known = self.labelling.types
        if known == 1:
            return None
        if max(types, default=0) >= known:
            raise ValueError(
                f"data.tokenizer: gives tokens of type {max(types)}, and the model knows types 0 "
                f"to {known - 1} (its config.json); use the tokenizer that belongs to it"
            )
        return np.array(types, dtype=np.uint8)


def _targets(found: Any, labels: Sequence[str] | None, labelling: Labelling) -> list[float]:
    """What is predicted: a number of the class, a flag for each, or numbers."""
    classes = labelling.classes
    if labelling.problem == "regression":
        return _numbers(found if isinstance(found, list) else [found], classes)
    if labelling.problem == _ONE_CLASS:
        return [_class_of(found, labels, classes)]
    chosen = _several(found, labels, classes)
    return [float(number in chosen) for number in range(classes)]


def _numbers(values: list[Any], count: int) -> list[float]:
    if len(values) != count:
        raise RowError(f"has {len(values)} numbers where model.classes = {count}")
    numbers = []
    for value in values:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise RowError("is not a number, which regression needs")
        if number == IGNORED_TARGET:
            raise RowError(
                f"is {IGNORED_TARGET}, which stands for a target that is not counted; shift or "
                "scale the numbers"
            )
        numbers.append(number)
    return numbers


def _several(found: Any, labels: Sequence[str] | None, classes: int) -> set[int]:
    """The labels of a row that has any number of them: listed, or as one flag per class."""
    if not isinstance(found, list):
        raise RowError("is not a list of labels, such as [0, 2] or []")
    if found and all(isinstance(value, bool | float) for value in found):
        if len(found) != classes or any(value not in (0, 1) for value in found):
            raise RowError(f"is not {classes} flags of 0 and 1 (model.classes)")
        return {number for number, value in enumerate(found) if value}
    numbers = [_class_of(value, labels, classes) for value in found]
    if len(set(numbers)) < len(numbers):
        raise RowError("has a label twice; list each once, or write flags as true and false")
    return set(numbers)


def _class_of(found: Any, labels: Sequence[str] | None, classes: int) -> int:
    if not isinstance(found, str | int):
        raise RowError(f"is {type(found).__name__}, not a label of text or a whole number")
    name = str(found).lower() if isinstance(found, bool) else str(found)  # as JSON spells it
    if labels is not None:
        if name not in labels:
            raise RowError(f"is not one of data.labels = {list(labels)}")
        return labels.index(name)
    try:
        number = int(name)
    except ValueError:
        raise RowError("is not a whole number; name the labels in data.labels") from None
    if not 0 <= number < classes:
        raise RowError(
            f"is not one of labels 0 to {classes - 1}, which model.classes = {classes} allows"
        )
    return number
