"""What was last seen of each sample, at one end of one direction of a cut.

Rows are stored as a codec's bytes (a float format, or quantized), keyed by sample id, in a tier
(`store.py`, `disk.py`). Both ends store the same values with the same codec, so they hold the same
bits. A step's new rows are staged and become visible at `commit`.

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
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thinpipe.aqsgd.store import RamStore, Store, row_checksum
from thinpipe.pipeline.wire.codec import Codec
from thinpipe.pipeline.wire.header import crc32
from thinpipe.pipeline.wire.pinned import brought_to
from thinpipe.pipeline.wire.uniform import PackedMemory

_log = logging.getLogger(__name__)

ROWS = "memory_rows"
"""Key of the bytes in `state_dict`: as large as the memory, so worth not copying."""

_HISTORY = struct.Struct("<qIQ")


class Visit(NamedTuple):
    """A known sample in a step: its old bytes, room for its new ones, and where these will stay."""

    sample: int
    memory: PackedMemory
    home: Tensor


class _History(NamedTuple):
    """What both ends know of a sample without looking at its row."""

    generation: int
    chain: int

    def after(self, wire: Tensor) -> "_History":
        return _History(self.generation + 1, crc32(wire, self.chain))


_UNSEEN = _History(0, 0)


class Beside(Protocol):
    """What both ends of a direction know beside their samples, and what rows are read with."""

    def digest(self) -> int:
        """A number below 2^32, equal at both ends."""

    def reset(self) -> None:
        """Know nothing."""


class SampleMemory:
    """Last seen values by sample id; ids that were never committed are unknown."""

    def __init__(
        self,
        codec: Codec,
        store: Store | None = None,
        *,
        capacity: int | None = None,
        beside: Beside | None = None,
    ) -> None:
        """`codec` turns values into stored bytes; it must be deterministic.

        `capacity` is how many samples this end could hold; the ends agree on one (`restrict`).
        """
        self.capacity, self._beside = capacity, beside
        self._codec, self._store = codec, store or RamStore()
        self._limit = capacity
        self._histories: dict[int, _History] = {}
        self._staged: dict[int, tuple[_History, Tensor]] = {}
        self._row_nbytes: int | None = None

    def __len__(self) -> int:
        """Number of samples held."""
        return len(self._histories)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self._histories) * (self._row_nbytes or 0)

    def restrict(self, ids_B: Tensor, samples: int) -> None:
        """Hold only these samples from here on, and at most so many; the lowest ids stay.

        Raises:
            OSError: there is no room for as many.
        """
        self._limit = samples
        held = sorted(self._histories.keys() & set(ids_B.tolist()))
        self._forget(list(self._histories.keys() - set(held[:samples])))
        self._store.reserve(samples)

    def fingerprints(self, ids_B: Tensor) -> Tensor:
        """A number (int64, below 2^33) for what is held of each sample: 0 nothing, -1 damaged."""
        prints = [self._fingerprint(sample) for sample in ids_B.tolist()]
        return torch.tensor(prints, dtype=torch.int64)

    def prefetch(self, ids_B: Tensor) -> None:
        """The next step will visit these samples."""
        self._store.prefetch(ids_B.tolist())

    def forget(self, ids_B: Tensor) -> None:
        """Drop what is held of these samples; unknown ones are passed over."""
        self._forget([sample for sample in ids_B.tolist() if sample in self._histories])

    def learned(self) -> int:
        """What is known beside samples, as a number; 0 without any."""
        return 0 if self._beside is None else self._beside.digest()

    def reset(self) -> None:
        """Drop all samples, and what is known beside them."""
        self._forget(list(self._histories))
        if self._beside is not None:
            self._beside.reset()

    def read(self, ids_B: Tensor, numel: int) -> Tensor:
        """fp32 values [B, N] of known samples.

        Raises:
            ValueError: a sample was of another size when it was seen: its content has changed.
        """
        rows = [self.row(sample, numel).cpu() for sample in ids_B.tolist()]
        out_BN = torch.empty(len(rows), numel)
        if rows:
            self._codec.decode(torch.stack(rows), out_BN)
        return out_BN

    def open(self, sample: int, numel: int, device: torch.device) -> Visit:
        """The old bytes of a known sample, and room for the new ones; ends with `close`.

        Both are where `device` codes them.

        Raises:
            ValueError: the sample was of another size when it was seen.
        """
        old = brought_to(device, self.row(sample, numel))
        home = self._store.empty_row(old.numel())
        fresh = _written(home, device)
        return Visit(sample, PackedMemory(self._codec, old[None], fresh[None]), home)

    def close(self, visit: Visit, wire: Tensor, *, keep: bool) -> None:
        """Stage what was written to `visit.memory.fresh_BW`, or forget it if it is not finite.

        `wire` (host) is what the sample was sent as.
        """
        if not keep:
            self._store.give_back(visit.home)
            return
        _bring_home(visit.memory.fresh_BW[0], visit.home)
        self._staged[visit.sample] = self._histories[visit.sample].after(wire), visit.home

    def stage(self, ids_B: Tensor, values_BN: Tensor, wire_BW: Tensor) -> None:
        """Keep first values aside until `commit`, with what they were sent as (host).

        A row that is not finite is not kept: both ends see it alike, and the sample's next visit
        is a first visit.
        """
        nbytes = self._fixed_nbytes(values_BN.shape[1], int(ids_B[0]))
        if self._limit is not None and len(self._histories) >= self._limit:
            return
        finite_B = torch.isfinite(values_BN).all(1)
        homes = [self._store.empty_row(nbytes) for _ in values_BN]
        for i, home in enumerate(homes):
            row = _written(home, values_BN.device)
            self._codec.encode(values_BN[i : i + 1], row[None], noise=None)
            _bring_home(row, home)
        for i, (sample, finite) in enumerate(zip(ids_B.tolist(), finite_B.tolist(), strict=True)):
            if finite:
                self._staged[sample] = _UNSEEN.after(wire_BW[i]), homes[i]
            else:
                self._store.give_back(homes[i])

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
        known = self._histories.get(sample, _UNSEEN)
        if known is _UNSEEN and self._limit is not None and len(self._histories) >= self._limit:
            return
        home = self._store.empty_row(nbytes)
        self._staged[sample] = known.after(row), home.copy_(row)

    def commit(self) -> None:
        """Make staged rows the memory, as far as there is room."""
        for sample, (history, row) in sorted(self._staged.items()):
            full = self._limit is not None and len(self._histories) >= self._limit
            if full and sample not in self._histories:
                self._store.give_back(row)
                continue
            self._histories[sample] = history
            self._store.put(sample, row)
        self._staged = {}
        self._store.end_step()

    def discard(self) -> None:
        """Forget staged rows."""
        for _, row in self._staged.values():
            self._store.give_back(row)
        self._staged = {}
        self._store.end_step()

    def digest(self) -> str:
        """SHA-256 of ids, histories and bytes: equal on both ends, always."""
        hasher = hashlib.sha256()
        for sample, history in sorted(self._histories.items()):
            hasher.update(_HISTORY.pack(sample, history.chain, history.generation))
            hasher.update(self._store.row(sample).cpu().numpy().data)
        return hasher.hexdigest()

    def summary(self) -> int:
        """A number (32 bits) for ids, histories and the checksums of rows; reads no row.

        Equal on both ends, unless what one of them computed or wrote is wrong.
        """
        total = 0
        for sample, history in sorted(self._histories.items()):
            held = _HISTORY.pack(sample, history.chain, history.generation)
            total = zlib.crc32(held + self._store.checksum(sample).to_bytes(4, "little"), total)
        return total

    def release(self) -> None:
        """Give back what is held; the memory is not used again."""
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
        """Replace the memory by what there is room for; samples of damaged rows are left out."""
        self.discard()
        self._forget(list(self._histories))
        nbytes = state["row_nbytes"]
        self._row_nbytes = nbytes or None
        fitting = set(sorted(state["ids"].tolist())[: self._limit])
        damaged = []
        fields = (state[name].tolist() for name in ("ids", "generation", "chain", "place", "sums"))
        for sample, generation, chain, place, checksum in sorted(
            zip(*fields, strict=True), key=_place
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
            self._histories[sample] = _History(generation, chain)
        if damaged:
            _log.warning(
                "memory: rows of %d samples (%d, ...) were damaged when they were saved",
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
        return zlib.crc32(_HISTORY.pack(sample, history.chain, history.generation)) + 1

    def _fixed_nbytes(self, numel: int, sample: int) -> int:
        """Bytes of a row, which are those of the first."""
        nbytes = self._codec.capacity(numel)
        self._row_nbytes = self._row_nbytes or nbytes
        if nbytes != self._row_nbytes:
            raise ValueError(
                f"sample {sample} has {numel} values, which take {nbytes} bytes, but the rows of "
                f"this memory have {self._row_nbytes}: the length of samples changed. Give all of "
                "them one length; pad short ones"
            )
        return nbytes


def _written(home: Tensor, device: torch.device) -> Tensor:
    """Where `device` can write what is to be in `home`: there, or in a row of its own."""
    return home if home.device == device else torch.empty_like(home, device=device)


def _bring_home(row: Tensor, home: Tensor) -> None:
    """Bring home what was written elsewhere."""
    if row.data_ptr() != home.data_ptr():
        home.copy_(row)


def _place(entry: tuple[int, ...]) -> int:
    return entry[3]
