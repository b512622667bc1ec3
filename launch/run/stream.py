"""Samples that come one after the other, from a dataset without a length: one pass over them.

Every rank reads the whole stream, in which sample i is the i-th, and takes those of its replica. A
run that resumes reads on to the sample that is next.
"""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.data.own import OwnSet, Reading
from thinpipe.launch.data.sample_set import Ids
from thinpipe.pipeline.batch import Batch

_DIGESTED = 16


class OwnStream:
    """The first `steps` times `size` samples of a stream, or fewer if it ends before."""

    shuffle = False

    def __init__(self, dataset: Any, name: str, size: int, steps: int, reading: Reading) -> None:
        """`size` are the samples of a step over all replicas.

        Raises:
            ValueError: it cannot be read twice from its beginning, as a resume does.
        """
        if iter(dataset) is dataset:
            raise ValueError(
                f"{name}: {type(dataset).__name__} can be read once only, and a resumed run reads "
                "it again from its beginning; give an object whose __iter__ begins anew"
            )
        self._dataset, self._name, self._size = dataset, name, size
        self._count, self._reading = size * steps, reading
        self._items: Iterator[Any] = iter(())
        self._at = -1
        self.notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self._count

    @property
    def longest(self) -> int | None:
        return self._reading.longest

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the first samples: the others come later."""
        first = OwnSet(list(islice(self._dataset, _DIGESTED)), self._name).digest
        return hashlib.sha256(f"{self._count} {first}".encode()).hexdigest()

    def batch(self, ids: Ids) -> Batch:
        """The samples of these places, from the beginning; what `step_batch` reads goes on."""
        wanted = [int(i) for i in ids]
        items = list(islice(self._dataset, max(wanted) + 1))
        return self._of({place: items[place] for place in wanted if place < len(items)})

    def step_batch(self, step: int, replica: int, replicas: int) -> Batch | None:
        """A replica's samples of a step; None once the stream has ended, on all replicas alike."""
        first = step * self._size
        if self._at != first:
            self._items, self._at = islice(self._dataset, first, None), first
        items = list(islice(self._items, self._size))
        self._at += len(items)
        each = len(items) // replicas
        if not each:
            return None
        places = range(replica, each * replicas, replicas)
        return self._of({first + place: items[place] for place in places})

    def _of(self, items: dict[int, Any]) -> Batch:
        return OwnSet(list(items.values()), self._name, reading=self._reading).batch_as(list(items))


def check_stream(config: RunConfig, samples: object) -> None:
    """Check that nothing is cached of samples that come once.

    Raises:
        ConfigError: a boundary does, or there are several epochs.
    """
    if not isinstance(samples, OwnStream):
        return
    for (cut, direction), spec in config.specs.items():
        if spec.remembers:
            raise ConfigError(
                f'boundary.{direction}.kind = "{spec.kind}" (cut {cut}): caches what it was sent '
                'of a sample, and a stream has each sample once; use kind = "stateless" '
                "(tp.Stateless) or a dataset with indices"
            )
    if config.train.epochs > 1:
        raise ConfigError(
            f"run.epochs({config.train.epochs}): a stream is read once; use run.epochs(1), with as "
            "many steps as you want"
        )
