"""Samples of a stream: read in one pass, in order, without knowing how much is still to come.

A stream is read in blocks of rows. A block is shuffled, made into samples, and given out; then the
next one is read. Sample n is the same on every rank and belongs to replica n modulo replicas, so
none is trained on twice. What is left of a block's running text begins the next one.

What is saved is where the current block begins. After a resume that block is made once more, and
those of its samples that were done are passed over.
"""

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from thinpipe.launch.data.own import OwnSet, Reading, digest_item
from thinpipe.launch.data.sample_set import Ids, SampleSet
from thinpipe.launch.data.sampler import EpochSampler, shuffled
from thinpipe.pipeline.batch import Batch

Carry = Tensor
"""Token ids that were too few for a sample (int32, 1-d)."""
Make = Callable[[Sequence[Any], Carry, int], tuple[SampleSet | None, Carry]]
"""Samples of a block (items, carry, number of the block), and what is left; None if too few."""
_Place = tuple[int, SampleSet, int]
"""A sample: its id, the samples of its block, and its number among them."""


class _Origin:
    """Where an object that is read begins: all who read it have to begin there."""

    first: str | None = None
    """A digest of its first item."""
    moved = False
    """Whether it was sent to another place, where it may begin from then on."""
    reader: object = None
    start: Any = None

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable
        self.returns = all(hasattr(iterable, name) for name in ("state_dict", "load_state_dict"))
        if self.returns:
            with suppress(Exception):  # one of a user's own may have no state before it is read
                self.start = copy.deepcopy(iterable.state_dict())


_ORIGINS: list[_Origin] = []
"""Of each object that this process reads: not every object can be a key."""


def _origin(iterable: Any) -> _Origin:
    found = next((origin for origin in _ORIGINS if origin.iterable is iterable), None)
    if found is None:
        _ORIGINS.append(found := _Origin(iterable))
    return found


class Items:
    """What an iterable gives, from a place that can be returned to.

    One with `state_dict` and `load_state_dict`, as those of the package datasets, returns by
    itself; of others, what was read before is read again. Its beginning is where it began when it
    was read for the first time, in this run or another one of this process.
    """

    def __init__(self, source: Callable[[], Iterable[Any]]) -> None:
        """`source` gives the iterable from its beginning.

        Raises:
            ValueError: it can be read once only, or does not return to its beginning.
        """
        self._source = source
        self.go_to({"taken": 0})

    def take(self, count: int) -> list[Any]:
        """The next items; fewer only at the end."""
        self._check_reader()
        found = list(itertools.islice(self._iterator, count))
        self._taken += len(found)
        return found

    def state(self) -> dict[str, Any]:
        """Where it is, for `go_to` (JSON)."""
        self._check_reader()
        own = self._iterable.state_dict() if self._origin.returns and self._taken else None
        return {"taken": self._taken, "own": own}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: it does not begin with the item that it began with.
        """
        self._iterable: Any = self._source()
        self._origin, own = _origin(self._iterable), state.get("own")
        self._origin.reader = self._reader = object()
        self._taken = int(state["taken"])
        if own is not None and self._origin.returns:
            self._iterator = self._begun(own)
        else:
            self._iterator = self._from_start()
            for _ in itertools.islice(self._iterator, self._taken):
                pass

    def _begun(self, state: Any = None) -> Iterator[Any]:
        if state is not None:
            self._iterable.load_state_dict(copy.deepcopy(state))
            self._origin.moved = True
        iterator: Iterator[Any] = iter(self._iterable)
        if iterator is self._iterable:
            raise ValueError(
                f"{self._name} can be read once only, and a resumed run reads it again from its "
                "beginning; give an object whose __iter__ begins anew"
            )
        return iterator

    def _from_start(self) -> Iterator[Any]:
        """The items from the first one, which is compared with what it was before."""
        origin = self._origin
        starts = ([] if origin.moved else [None]) + ([] if origin.start is None else [origin.start])
        for start in starts:
            iterator, digest = self._begun(start), hashlib.sha256()
            first = list(itertools.islice(iterator, 1))
            digest_item(first, digest)
            origin.first = origin.first or digest.hexdigest()
            if digest.hexdigest() == origin.first:
                return itertools.chain(first, iterator)
        raise ValueError(
            f"{self._name} was read before and does not begin again with the same item; give each "
            "run an object of its own, whose __iter__ begins anew"
        )

    def _check_reader(self) -> None:
        if self._origin.returns and self._origin.reader is not self._reader:
            raise ValueError(
                f"{self._name}: another run, or run.batches once more, began to read it, and its "
                "state_dict is that of one of them; give each an object of its own"
            )

    @property
    def _name(self) -> str:
        return type(self._iterable).__name__


class StreamSet:
    """The samples of a stream, at most `total` of them; each is given once, in ascending order.

    `longest` are the most tokens of one, if they differ in length.
    """

    def __init__(
        self,
        items: Items,
        make: Make,
        *,
        what: str,
        block: int,
        seed: int | None,
        total: int,
        longest: int | None = None,
    ) -> None:
        """Samples begin with the next of the items, which are read `block` at a time.

        These are shuffled together, by a seed if there is one.
        """
        self._items, self._make, self._what = items, make, what
        self._size, self._seed, self._total = block, seed, total
        self.notes: tuple[str, ...] = ()
        self.longest = longest
        none = torch.zeros(0, dtype=torch.int32)
        self._start = {"first": 0, "number": 0, "items": self._place(), "carry": none}
        self._state: dict[str, Any] = dict(self._start)
        self._read()

    def __len__(self) -> int:
        return self._total

    def batch(self, ids: Ids) -> Batch:
        """Samples, in the order of `ids`, which ascends; going back reads from the beginning.

        Raises:
            ValueError: the stream ends before them.
        """
        found = self._places([int(each) for each in ids])
        if len(found) < len(ids):
            raise ValueError(
                f"{self._what}: the stream ended after {self._stop} samples, and sample "
                f"{int(ids[len(found)]) + 1} is needed; use fewer"
            )
        return _batch(found)

    def share(self, ids: Sequence[int], replica: int, replicas: int) -> Batch | None:
        """A replica's samples of a step, as many as the others have.

        None once the stream has ended, on all replicas alike: each looks for all samples.
        """
        found = self._places(ids)
        own = found[replica : len(found) // replicas * replicas : replicas]
        return _batch(own) if own else None

    @cached_property
    def digest(self) -> str:
        """Of the first sample: the others are not known, nor how many a run will take."""
        digest = hashlib.sha256(f"{self._size} {self._seed}".encode())
        part = self.batch([0])
        for leaf in tree_leaves([getattr(part, field.name) for field in fields(part)]):
            if leaf is not None:
                digest.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)
        self._items.go_to(json.loads(state["items"]))
        self._read()

    @property
    def _stop(self) -> int:
        return int(self._state["first"]) + (0 if self._samples is None else len(self._samples))

    def _places(self, ids: Sequence[int]) -> list[_Place]:
        """Where samples are; fewer if the stream ends before."""
        found = list[_Place]()
        for sample in ids:
            if sample < self._state["first"]:
                self.load_state_dict(self._start)
            while sample >= self._stop:
                if self._over:
                    return found
                self._state = {
                    "first": self._stop,
                    "number": self._state["number"] + 1,
                    "items": self._place(),
                    "carry": self._left,
                }
                self._read()
            assert self._samples is not None, "it has the sample"
            found.append((sample, self._samples, sample - self._state["first"]))
        return found

    def _place(self) -> str:
        state = self._items.state()
        try:
            return json.dumps(state)
        except TypeError as error:
            raise ValueError(
                f"{self._what}: its state_dict cannot be saved ({error}); return numbers, strings, "
                "lists and dicts of them"
            ) from None

    def _read(self) -> None:
        number, items = int(self._state["number"]), self._items.take(self._size)
        self._over = len(items) < self._size
        if self._seed is not None:
            order = shuffled(len(items), self._seed, f"block {number}")
            items = [items[place] for place in order.tolist()]
        self._samples, self._left = self._make(items, self._state["carry"], number)


def own_stream(dataset: Any, name: str, size: int, steps: int, reading: Reading) -> StreamSet:
    """The samples of a program's dataset, in its order, of which a step takes `size`."""
    return StreamSet(
        Items(lambda: dataset),
        partial(own_block, name, reading),
        what=name,
        block=size,
        seed=None,
        total=size * steps,
        longest=reading.longest,
    )


def own_block(
    name: str, reading: Reading, items: Sequence[Any], carry: Carry, number: int
) -> tuple[SampleSet | None, Carry]:
    """A block of samples that are batches as they are."""
    name = f"{name}, block {number + 1}"  # messages count samples within it
    return (OwnSet(items, name, reading=reading, block=number) if items else None), carry


class StreamSampler:
    """As EpochSampler, for samples that come in one order: a single epoch of `steps`."""

    left_out = 0

    def __init__(self, samples: StreamSet, *, batch_size: int, replicas: int, replica: int) -> None:
        self.steps_per_epoch = len(samples) // batch_size
        self._samples, self._batch = samples, batch_size
        self._replicas, self._replica = replicas, replica

    def all_ids(self) -> Tensor:
        """None: no activation of a stream is cached, and its samples may be without end."""
        return torch.empty(0, dtype=torch.int64)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def steps_of(self, epoch: int) -> range:
        return range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)

    def steps(self, epochs: int, most: int | None) -> int:
        whole = self.steps_of(epochs - 1).stop
        return whole if most is None else min(whole, most)

    def samples(self, step: int) -> int:
        return self._batch

    def batch(self, step: int) -> Batch | None:
        """This replica's samples of a step; None if the stream has ended."""
        ids = range(step * self._batch, (step + 1) * self._batch)
        return self._samples.share(ids, self._replica, self._replicas)

    def ids(self, step: int) -> Tensor:
        first = step * self._batch
        return torch.arange(first + self._replica, first + self._batch, self._replicas)


Sampler = EpochSampler | StreamSampler


def position(samples: SampleSet) -> StreamSet | None:
    """What has to be saved of samples to go on with them; None if a step's number says it."""
    return samples if isinstance(samples, StreamSet) else None


def _batch(places: Sequence[_Place]) -> Batch:
    groups = (list(own) for _, own in itertools.groupby(places, key=lambda place: id(place[1])))
    parts = [own[0][1].batch([number for _, _, number in own]) for own in groups]
    ids_B = torch.tensor([sample for sample, _, _ in places])
    if len(parts) == 1:
        return replace(parts[0], ids_B=ids_B)
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Batch)}
    joined: dict[str, Any] = {
        name: None if found[0] is None else tree_map(lambda *same: torch.cat(same), *found)
        for name, found in columns.items()
    }
    return Batch(**joined | {"ids_B": ids_B})
