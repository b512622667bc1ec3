"""Samples of the user's own: any map-style dataset whose items are (input, target).

Axes: B samples.
"""

import functools
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from thinpipe.launch.data.sample_set import Ids, checked_ids
from thinpipe.pipeline.batch import Batch
from thinpipe.pipeline.models.own.functions import load_function

_DIGESTED = 256
"""Samples that a digest looks at, spread evenly: reading all could take as long as an epoch."""


class Dataset(Protocol):
    """As torch.utils.data.Dataset: items 0 to N - 1, which must not change."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return (input, target), two tensors of the same shapes for all samples."""


class OwnSet:
    """The samples `first` to `stop - 1` of a dataset, numbered from 0."""

    def __init__(
        self,
        dataset: Dataset,
        name: str,
        *,
        first: int = 0,
        stop: int | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """`name` is how messages call the dataset.

        Raises:
            ValueError: it is not a map-style dataset, or empty.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"{name}: {type(dataset).__name__} is not a map-style dataset; it needs "
                "__len__ and __getitem__, as sample ids are indices"
            )
        self._dataset, self._name, self._first = dataset, name, first
        self._count = (len(dataset) if stop is None else stop) - first
        if self._count < 1:
            raise ValueError(f"{name}: {self._count} samples; it needs at least one")
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: Ids) -> Batch:
        ids_B = checked_ids(ids, len(self))
        items = [self._item(i) for i in ids_B.tolist()]
        inputs, targets = (self._stack(column, ids_B) for column in zip(*items, strict=True))
        return Batch(inputs, targets, ids_B)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the number of samples and of 256 to 511 of them, or all of fewer."""
        chosen = range(0, len(self), max(1, len(self) // _DIGESTED))
        digest = hashlib.sha256(str(len(self)).encode())
        for tensor in (part for index in chosen for part in self._item(index)):
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _item(self, index: int) -> tuple[Tensor, Tensor]:
        item = self._dataset[self._first + index]
        pair = tuple(item) if isinstance(item, tuple | list) else ()
        if len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
            raise ValueError(
                f"{self._name}: sample {index} is {_kind(item)}; return (input, target), two "
                "tensors"
            )
        return pair[0].detach().cpu(), pair[1].detach().cpu()

    def _stack(self, column: Sequence[Tensor], ids_B: Tensor) -> Tensor:
        shapes = {tuple(tensor.shape): i for tensor, i in zip(column, ids_B.tolist(), strict=True)}
        if len(shapes) > 1:
            (one, first), (other, second), *_ = shapes.items()
            raise ValueError(
                f"{self._name}: sample {first} has shape {list(one)} and sample {second} "
                f"{list(other)}; give all the same shape, for example by padding"
            )
        return torch.stack(list(column))


def load_own(factory: str, eval_factory: str | None, held_out: int) -> tuple[OwnSet, OwnSet]:
    """The datasets that two functions return; without the second, the last samples of the first.

    Raises:
        ValueError: a function cannot be imported, fails, or returns something else.
    """
    training = made(factory, "data.factory")
    name = f'data.factory = "{factory}"'
    if eval_factory is not None:
        evaluation = made(eval_factory, "data.eval_factory")
        return OwnSet(training, name), OwnSet(evaluation, f'data.eval_factory = "{eval_factory}"')
    count = len(OwnSet(training, name))
    if held_out >= count:
        raise ValueError(
            f"{name}: {count} samples, and data.eval_sequences = {held_out} of them are to be held "
            "out; hold out fewer, or name a dataset of its own in data.eval_factory"
        )
    kept = count - held_out
    note = f"note: the last {held_out} samples of {name} are held out for evaluation"
    return (
        OwnSet(training, name, stop=kept, notes=[note]),
        OwnSet(training, name, first=kept),
    )


@functools.cache
def made(factory: str, setting: str) -> Dataset:
    """What the function returns, made once in a process."""
    make = load_function(factory, setting)
    try:
        dataset: Dataset = make()
    except Exception as error:
        raise ValueError(
            f'{setting} = "{factory}": fails: {type(error).__name__}: {error}'
        ) from error
    return dataset


def _kind(item: Any) -> str:
    if isinstance(item, tuple | list):
        return f"{type(item).__name__} of {', '.join(type(part).__name__ for part in item)}"
    return type(item).__name__
