"""Samples of the user's own: a map-style dataset, or a torch DataLoader of one.

An item is (input, target), a longer tuple whose last member is the target, or a dict with labels.

Axes: B samples.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data import default_collate as TORCHS

from thinpipe.launch.data.sample_set import Ids, checked_ids
from thinpipe.pipeline.batch import Batch, PyTree
from thinpipe.pipeline.models.own.functions import load_function

_DIGESTED = 256
"""Samples that a digest looks at, spread evenly: reading all could take as long as an epoch."""
_TARGETS = ("labels", "label", "targets", "target")
"""Names that a dict may have for what the loss compares with."""

Collate = Callable[[list[Any]], Any]


class Dataset(Protocol):
    """As torch.utils.data.Dataset: items 0 to N - 1, which must not change."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """Return (input, target), or a dict with labels."""


@dataclass(frozen=True)
class Reading:
    """How samples become batches.

    `collate` makes a batch of a list of items, as a DataLoader's `collate_fn` does; without it all
    items have one shape. Batches may be of different lengths: `longest` is the most tokens that one
    has. Samples come in an order that is drawn anew for each epoch unless `shuffle` is False.
    """

    collate: Collate | None = None
    longest: int | None = None
    shuffle: bool = True


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
        reading: Reading | None = None,
        block: int = 0,
    ) -> None:
        """`name` is how messages call the dataset, `block` its number among those of a stream.

        Raises:
            ValueError: it is not a map-style dataset, or empty.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"{name}: {type(dataset).__name__} is not a map-style dataset; it needs "
                "__len__ and __getitem__, as sample ids are indices"
            )
        self._dataset, self._name, self._first, self._block = dataset, name, first, block
        self.reading = reading or Reading()
        self.longest, self.shuffle = self.reading.longest, self.reading.shuffle
        self._count = (len(dataset) if stop is None else stop) - first
        if self._count < 1:
            raise ValueError(f"{name}: {self._count} samples; it needs at least one")
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return self._count

    def batch(self, ids: Ids) -> Batch:
        ids_B = checked_ids(ids, len(self))
        items = [self._dataset[self._first + i] for i in ids_B.tolist()]
        if self.reading.collate is None:
            batch = tree_map(self._stack, *map(self._checked, ids_B.tolist(), items))
        else:
            with _drawing_alike(ids_B, self._block):
                batch = _tensors(self.reading.collate(items))
            self._check_collated(batch, len(ids_B))
        inputs, targets = _parted(batch)
        return Batch(inputs, targets, ids_B)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the number of samples and of 256 to 511 of them, or all of fewer."""
        digest = hashlib.sha256(str(len(self)).encode())
        for index in range(0, len(self), max(1, len(self) // _DIGESTED)):
            unlike = digest_item(self._dataset[self._first + index], digest)
            if unlike is not None:
                raise ValueError(
                    f"{self._name}: sample {index} holds a {unlike}, which ranks cannot "
                    "compare; return tensors, numbers and strings"
                )
        return digest.hexdigest()

    def _checked(self, index: int, item: Any) -> PyTree:
        try:
            found = _tensors(item)
        except (TypeError, ValueError, RuntimeError):
            found = None
        if not _has_target(found):
            raise ValueError(
                f"{self._name}: sample {index} is {_kind(item)}; return (input, target), two "
                "tensors, or a dict of tensors with labels"
            )
        return found

    def _stack(self, *tensors: Tensor) -> Tensor:
        shapes = {tuple(tensor.shape): place for place, tensor in enumerate(tensors)}
        if len(shapes) > 1:
            (one, place), (other, second), *_ = shapes.items()
            raise ValueError(
                f"{self._name}: sample {place} of a batch has shape {list(one)} and sample "
                f"{second} {list(other)}; give all the same shape, or a collate function that pads "
                "them: run.batches(..., collate=...)"
            )
        return torch.stack(tensors)

    def _check_collated(self, batch: PyTree, samples: int) -> None:
        if not _has_target(batch):
            raise ValueError(
                f"{self._name}: the collate function returned {_kind(batch)}; return (input, "
                "target), or a dict of tensors with labels"
            )
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        wrong = [shape for shape in shapes if shape[:1] != (samples,)]
        if wrong:
            raise ValueError(
                f"{self._name}: the collate function returned a tensor of shape "
                f"{list(wrong[0])} for {samples} samples; let the first axis be the samples"
            )


def own_set(
    samples: Any, name: str, *, size: int | None = None, reading: Reading | None = None
) -> tuple[OwnSet, int]:
    """Samples and their batch size, of a dataset or a DataLoader.

    Raises:
        ValueError: a DataLoader asks for what is not done here, or there is no size.
    """
    reading = reading or Reading()
    if isinstance(samples, DataLoader):
        samples, name, size, reading = _of_loader(samples, size, reading)
    if size is None:
        raise ValueError(f"{name}: give the samples of a step: run.batches(..., size=32)")
    return OwnSet(samples, name, reading=reading), size


def _of_loader(
    loader: DataLoader[Any], size: int | None, reading: Reading
) -> tuple[Any, str, int | None, Reading]:
    """What a DataLoader says of its batches; which samples are in them is drawn from the seed."""
    name = f"DataLoader of {type(loader.dataset).__name__}"
    if size is not None and loader.batch_size not in (None, size):
        raise ValueError(
            f"{name}: batch_size = {loader.batch_size}, but size = {size}; give one of them"
        )
    is_known = type(loader.sampler) in (RandomSampler, SequentialSampler)
    rejected = {
        "a sampler of its own": not is_known or loader.batch_size is None,
        "drop_last": loader.drop_last,
        "workers": loader.num_workers > 0,
    }
    asked = [what for what, given in rejected.items() if given]
    if asked:
        raise ValueError(
            f"{name}: has {' and '.join(asked)}; which samples a step has follows from the run's "
            "seed, and each rank reads them itself: give the dataset, run.batches(dataset, size=, "
            "collate=)"
        )
    collate = reading.collate or (None if loader.collate_fn is TORCHS else loader.collate_fn)
    shuffle = reading.shuffle and type(loader.sampler) is RandomSampler
    reading = Reading(collate, reading.longest, shuffle)
    return loader.dataset, name, size or loader.batch_size, reading


def digest_item(item: Any, digest: Any) -> str | None:
    """Add an item to a digest; the type of what cannot be compared, if it holds such a thing."""
    unlike = None
    for leaf in tree_leaves(_plain(item)):
        if hasattr(leaf, "__array__"):
            with suppress(TypeError):  # one of strings
                leaf = torch.as_tensor(leaf)
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous()
            digest.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            digest.update(leaf.view(-1).view(torch.uint8).numpy().tobytes())
        elif leaf is None or isinstance(leaf, str | int | float | bytes):
            digest.update(repr(leaf).encode())
        else:
            unlike = type(leaf).__name__
            digest.update(unlike.encode())
    return unlike


def _plain(value: Any) -> Any:
    """Mappings of any kind as dicts, so that their leaves are found."""
    if isinstance(value, Mapping) or hasattr(value, "keys"):
        return {name: _plain(value[name]) for name in sorted(value.keys(), key=str)}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value


def _tensors(value: Any, *, whole: bool = True) -> PyTree:
    """A batch or an item as tensors on the CPU, in dicts and tuples; or a part of it."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping) or hasattr(value, "keys"):
        return {name: _tensors(value[name], whole=False) for name in value.keys()}  # noqa: SIM118  UserDict too
    if isinstance(value, tuple | list) and (whole or not _is_array(value)):
        return tuple(_tensors(one, whole=False) for one in value)
    return torch.as_tensor(value)


def _is_array(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_array, value))
    return isinstance(value, int | float)


def _has_target(batch: PyTree) -> bool:
    if isinstance(batch, Mapping):
        return len(batch) > 1 and sum(name in batch for name in _TARGETS) == 1
    return isinstance(batch, tuple | list) and len(batch) > 1


def _parted(batch: PyTree) -> tuple[PyTree, PyTree]:
    if isinstance(batch, Mapping):
        (target,) = (name for name in _TARGETS if name in batch)
        return {name: part for name, part in batch.items() if name != target}, batch[target]
    *inputs, targets = batch
    return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets


@contextmanager
def _drawing_alike(ids_B: Tensor, block: int) -> Iterator[None]:
    """What a collate function draws at random is alike on all ranks: it follows from the ids."""
    digest = hashlib.sha256(ids_B.numpy().tobytes() + bytes(f"{block}", "ascii")).digest()
    seed = int.from_bytes(digest[:8], "big") >> 1
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)


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
    return OwnSet(training, name, stop=kept, notes=[note]), OwnSet(training, name, first=kept)


@cache
def made(factory: str, setting: str) -> Dataset:
    """What the function returns, made once in a process."""
    make = load_function(factory, setting)
    try:
        dataset: Dataset = make()
    except Exception as error:
        raise ValueError(
            f'{setting} = "{factory}": called without arguments, it fails: '
            f"{type(error).__name__}: {error}; correct it"
        ) from error
    return dataset


def _kind(item: Any) -> str:
    kind = type(item).__name__
    if isinstance(item, tuple | list):
        return f"{kind} of {', '.join(type(part).__name__ for part in item)}"
    return f"{kind} of {', '.join(map(str, item))}" if isinstance(item, Mapping) else kind
