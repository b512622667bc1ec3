"""The activation cache: what was last seen of each sample, at one end of one direction of a cut.

Rows are bytes, keyed by sample id, in a tier (`store.py`, `disk.py`): a codec's (`coded_memory.py`)
or coefficients (`transform/rows.py`). Both ends store the same bits. A step's new rows are staged
and become visible at `commit`.

Of every sample both ends also know its generation, the number of committed visits, and its chain,
the CRC-32 of all it was sent since its first visit. They are equal at both ends by construction,
and stand for the row when the ends compare what they hold (`fingerprints`).

When not all samples fit, those seen first stay and others are not taken in: both ends choose alike
without a message. No rule finds more: an epoch visits each sample once, so what it finds was held
when the epoch began, and no more is held than fits. (Least-recently-used, with room for a third,
finds 6 % again where this finds 33 %.)

Axes: B samples, N values of a sample, W bytes.
"""

import hashlib
import logging
import struct
import zlib
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thinpipe.aqsgd.store import RamStore, Store, row_checksum
from thinpipe.pipeline.wire.header import crc32

_log = logging.getLogger(__name__)

ROWS = "memory_rows"
"""Key of the bytes in `state_dict`: as large as the cache, so worth not copying."""


class History(NamedTuple):
    """What both ends know of a sample without looking at its row."""

    generation: int
    chain: int

    def after(self, wire: Tensor) -> "History":
        return History(self.generation + 1, crc32(wire, self.chain))

    def packed(self, sample: int) -> bytes:
        return struct.pack("<qIQ", sample, self.chain, self.generation)


UNSEEN = History(0, 0)
"""That of samples that were never committed."""


class SharedState(Protocol):
    """What both ends of a direction know besides their samples, and what rows are read with."""

    def digest(self) -> int:
        """A number below 2^32, equal at both ends."""

    def reset(self) -> None:
        """Know nothing."""


class SampleMemory:
    """Last seen values by sample id; ids that were never committed are unknown."""

    def __init__(
        self,
        row_nbytes: Callable[[int], int],
        store: Store | None = None,
        *,
        capacity: int | None = None,
        shared: SharedState | None = None,
        caches: bool = True,
    ) -> None:
        """`row_nbytes` are those of a sample of so many values.

        `capacity` is how many samples this end could hold; the ends agree on one (`restrict`). One
        that `caches` none only has what is `shared`.
        """
        self.capacity, self._shared, self.caches = capacity, shared, caches
        self._nbytes_of, self._store = row_nbytes, store or RamStore()
        self._limit = capacity
        self._histories: dict[int, History] = {}
        self._staged: dict[int, tuple[History, Tensor]] = {}
        self._lost: set[int] = set()
        self._row_nbytes: int | None = None

    def __len__(self) -> int:
        return len(self._histories)

    def __contains__(self, sample: int) -> bool:
        return sample in self._histories

    @property
    def nbytes(self) -> int:
        return len(self._histories) * (self._row_nbytes or 0)

    def restrict(self, ids_B: Tensor, samples: int) -> None:
        """Hold at most so many samples from here on, of these first; the lowest ids stay.

        What these leave of the room others have, which may come back.
        """
        self._limit, own = samples, set(ids_B.tolist())
        held = sorted(self._histories.keys() & own)[:samples]
        others = sorted(self._histories.keys() - own)[: max(0, samples - len(own))]
        self._forget(list(self._histories.keys() - {*held, *others}))
        self._store.reserve(samples)

    def fingerprints(self, ids_B: Tensor) -> Tensor:
        prints = [self._fingerprint(sample) for sample in ids_B.tolist()]
        return torch.tensor(prints, dtype=torch.int64)

    def prefetch(self, ids_B: Tensor) -> None:
        self._store.prefetch(ids_B.tolist())

    def forget(self, ids_B: Tensor) -> None:
        self._forget([sample for sample in ids_B.tolist() if sample in self._histories])

    def learned(self) -> int:
        return 0 if self._shared is None else self._shared.digest()

    def reset(self) -> None:
        self._forget(list(self._histories))
        if self._shared is not None:
            self._shared.reset()

    def row(self, sample: int, numel: int) -> Tensor:
        """The bytes held of a known sample, valid until the end of the step.

        Raises:
            ValueError: the sample was of another size when it was seen.
        """
        self._fixed_nbytes(numel, sample)
        return self._store.row(sample)

    def renew(self, sample: int, row: Tensor, numel: int) -> None:
        """Keep bytes (host) of a sample aside until `commit`, whether it is known or not."""
        nbytes = self._fixed_nbytes(numel, sample)
        known = self._histories.get(sample, UNSEEN)
        if known is UNSEEN and self._limit is not None and len(self._histories) >= self._limit:
            return
        home = self._store.empty_row(nbytes)
        self._staged[sample] = known.after(row), home.copy_(row)

    def lose(self, sample: int) -> None:
        """Forget a known sample at the end of the step."""
        self._lost.add(sample)

    def commit(self) -> None:
        """Make staged rows the cache, as far as there is room."""
        self._forget(sorted(self._lost))
        # by id, whatever came first: both ends must let in the same samples
        for sample, (history, row) in sorted(self._staged.items()):
            full = self._limit is not None and len(self._histories) >= self._limit
            if full and sample not in self._histories:
                self._store.give_back(row)
                continue
            self._histories[sample] = history
            self._store.put(sample, row)
        self._staged, self._lost = {}, set()
        self._store.end_step()

    def discard(self) -> None:
        for _, row in self._staged.values():
            self._store.give_back(row)
        self._staged, self._lost = {}, set()
        self._store.end_step()

    def digest(self) -> str:
        """SHA-256 of ids, histories and bytes: equal on both ends, always."""
        hasher = hashlib.sha256()
        for sample, history in sorted(self._histories.items()):
            hasher.update(history.packed(sample))
            hasher.update(self._store.row(sample).cpu().numpy().data)
        return hasher.hexdigest()

    def summary(self) -> int:
        """A number (32 bits) for ids, histories and the checksums of rows; reads no row.

        Equal on both ends, unless what one of them computed or wrote is wrong.
        """
        total = 0
        for sample, history in sorted(self._histories.items()):
            checksum = self._store.checksum(sample).to_bytes(4, "little")
            total = zlib.crc32(history.packed(sample) + checksum, total)
        return total

    def release(self) -> None:
        self._store.close()

    def state_dict(self) -> dict[str, Any]:
        """Ids and histories; all bytes end to end, with each sample's place among them.

        Valid until the next step.
        """
        ids = sorted(self._histories)
        rows, place, sums = self._store.pack(ids)
        histories = [self._histories[sample] for sample in ids]
        return {
            "ids": torch.tensor(ids, dtype=torch.int64),
            "generation": torch.tensor([h.generation for h in histories], dtype=torch.int64),
            "chain": torch.tensor([h.chain for h in histories], dtype=torch.int64),
            "place": place,
            "sums": sums,
            "row_nbytes": self._row_nbytes or 0,
            ROWS: rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the cache by what there is room for; samples of damaged rows are left out."""
        self.discard()
        self._forget(list(self._histories))
        nbytes = state["row_nbytes"]
        self._row_nbytes = nbytes or None
        fitting = set(sorted(state["ids"].tolist())[: self._limit])
        damaged = []
        fields = (state[name].tolist() for name in ("ids", "generation", "chain", "place", "sums"))
        # by place: a file is then read forwards
        for sample, generation, chain, place, checksum in sorted(
            zip(*fields, strict=True), key=itemgetter(3)
        ):
            if sample not in fitting:
                continue
            row = state[ROWS][place * nbytes : (place + 1) * nbytes]
            if row_checksum(row) != checksum:
                damaged.append(sample)
                continue
            own = self._store.empty_row(nbytes)
            self._store.put(sample, own.copy_(row))
            self._store.end_step()  # so that not all rows wait in memory for the disk
            self._histories[sample] = History(generation, chain)
        if damaged:
            _log.warning(
                "activation cache: rows of %d samples (%d, ...) were damaged when they were saved",
                len(damaged),
                damaged[0],
            )

    def _forget(self, samples: list[int]) -> None:
        for sample in samples:
            del self._histories[sample]
            self._store.drop(sample)

    def _fingerprint(self, sample: int) -> int:
        history = self._histories.get(sample)
        if history is None:
            return 0
        if self._store.is_lost(sample):
            return -1
        return zlib.crc32(history.packed(sample)) + 1  # 0: none

    def _fixed_nbytes(self, numel: int, sample: int) -> int:
        """Bytes of a row, which are those of the first."""
        nbytes = self._nbytes_of(numel)
        self._row_nbytes = self._row_nbytes or nbytes
        if nbytes != self._row_nbytes:
            raise ValueError(
                f"sample {sample} has {numel} values, which take {nbytes} bytes, but the rows of "
                f"this activation cache have {self._row_nbytes}: the length of samples changed. "
                "Give all of them one length; pad short ones"
            )
        return nbytes
