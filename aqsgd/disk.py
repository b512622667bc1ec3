"""The disk tier: rows in a file of their own, read a step ahead and written behind, by one thread.

The thread works in the order of submission, so a read sees every write before it. Every row that is
read has a buffer of its own, which nobody writes to: buffers shared between reading and writing
are how published code mixed samples up. Rows carry a checksum. What cannot be written or comes back
damaged is a lost row, never an exception in the middle of a step: it is noticed when it is
prefetched, and the two ends then agree to forget the sample.

The file has no name: however the process ends, the disk gets its space back.
"""

import errno
import heapq
import logging
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor

from thinpipe.aqsgd.store import LostRowError, row_checksum

_log = logging.getLogger(__name__)


class RowFile:
    """Rows of equal length by number, in an unnamed file; every failure is an OSError."""

    def __init__(self, folder: Path, row_nbytes: int) -> None:
        """The file takes space in `folder`, which is made if it is missing."""
        self.row_nbytes = row_nbytes
        folder.mkdir(parents=True, exist_ok=True)
        self._file = TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115  closed by `close`

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    def reserve(self, rows: int) -> None:
        if rows:
            # a full disk then fails the start, not some step
            os.posix_fallocate(self.descriptor, 0, rows * self.row_nbytes)

    def clear(self) -> None:
        os.ftruncate(self.descriptor, 0)

    def read(self, number: int) -> Tensor:
        row = torch.empty(self.row_nbytes, dtype=torch.uint8)
        view, done = row.numpy().data, 0
        while done < self.row_nbytes:
            got = os.preadv(self.descriptor, [view[done:]], number * self.row_nbytes + done)
            if got == 0:
                raise OSError(errno.EIO, "the file is too short")
            done += got
        return row

    def write(self, number: int, row: Tensor) -> None:
        view, done = row.numpy().data, 0
        while done < self.row_nbytes:
            done += os.pwrite(self.descriptor, view[done:], number * self.row_nbytes + done)

    def close(self) -> None:
        self._file.close()


class DiskStore:
    """Rows on disk. What it holds in memory: this step's rows, the next step's, and those on their
    way to the file, which are at most two steps' worth.
    """

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._worker = ThreadPoolExecutor(1, "memory-on-disk")
        self._ready: dict[int, Future[Tensor | None]] = {}
        self._coming: dict[int, Future[Tensor | None]] = {}
        self._announced: set[int] = set()
        self._writes: list[Future[None]] = []
        self._earlier_writes: list[Future[None]] = []
        # the worker's alone:
        self._sums: dict[int, int] = {}  # by slot, of rows that are whole
        self._faults: set[str] = set()

    def reserve(self, samples: int) -> None:
        """Set disk space aside. Of an empty store all that it had is given back first."""
        if not self._slots:
            self._free.clear()
            self._worker.submit(self._file.clear).result()  # after the writes on their way
        self._file.reserve(samples)

    def empty_row(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, row: Tensor) -> None:
        """Nothing: rows are not used twice."""

    def row(self, sample: int) -> Tensor:
        """The prefetched row; one that was not announced is read now."""
        if sample not in self._ready:
            self._ready[sample] = self._begin_read(sample)
        row = self._ready[sample].result()
        if row is None:
            raise LostRowError(
                f"the stored activations of sample {sample} are damaged and were not prefetched, "
                "so the other end cannot learn of it in time; announce samples a step ahead"
            )
        return row

    def put(self, sample: int, row: Tensor) -> None:
        """Write in the background; the next step has the row from memory."""
        if sample not in self._slots:
            # the lowest free one: `pack` maps the file up to the highest in use
            self._slots[sample] = heapq.heappop(self._free) if self._free else len(self._slots)
        self._writes.append(self._worker.submit(self._write, self._slots[sample], row))
        if sample in self._announced:
            self._coming[sample] = Future()
            self._coming[sample].set_result(row)

    def drop(self, sample: int) -> None:
        heapq.heappush(self._free, self._slots.pop(sample))
        self._coming.pop(sample, None)

    def prefetch(self, samples: Iterable[int]) -> None:
        self._announced = set(samples)
        for sample in self._announced & self._slots.keys():
            self._coming[sample] = self._begin_read(sample)

    def is_lost(self, sample: int) -> bool:
        """Whether the row that was prefetched, or lent in this step, is damaged."""
        fetched = self._ready.get(sample) or self._coming.get(sample)
        return fetched is not None and fetched.result() is None

    def checksum(self, sample: int) -> int:
        """0: the thread that writes has it."""
        return 0

    def end_step(self) -> None:
        """Hand the prefetched rows over; wait for the writes of the step before."""
        self._ready, self._coming, self._announced = self._coming, {}, set()
        wait(self._earlier_writes)
        self._earlier_writes, self._writes = self._writes, []

    def pack(self, samples: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The file itself, mapped privately: what is saved need not fit into memory."""
        wait([*self._earlier_writes, *self._writes])
        slots = [self._slots[sample] for sample in samples]
        nbytes = (max(slots) + 1 if slots else 0) * self._file.row_nbytes
        packed = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            if os.fstat(self._file.descriptor).st_size < nbytes:  # else the end cannot be mapped
                os.ftruncate(self._file.descriptor, nbytes)
            name = f"/proc/self/fd/{self._file.descriptor}"
            packed = torch.from_file(name, shared=False, size=nbytes, dtype=torch.uint8)
        sums = [self._sums.get(slot, -1) for slot in slots]
        return packed, torch.tensor(slots, dtype=torch.int64), torch.tensor(sums)

    def close(self) -> None:
        self._worker.shutdown()
        self._file.close()

    def _begin_read(self, sample: int) -> Future[Tensor | None]:
        return self._worker.submit(self._read, self._slots[sample])

    def _read(self, slot: int) -> Tensor | None:
        if slot not in self._sums:
            return None
        try:
            row = self._file.read(slot)
        except OSError as error:
            self._warn_once(f"rows cannot be read: {error.strerror}")
            return None
        if row_checksum(row) != self._sums[slot]:
            self._warn_once("rows came back damaged")
            return None
        return row

    def _write(self, slot: int, row: Tensor) -> None:
        self._sums.pop(slot, None)  # lost, until all of it is written
        try:
            self._file.write(slot, row)
        except OSError as error:
            self._warn_once(f"rows cannot be written: {error.strerror}")
            return
        self._sums[slot] = row_checksum(row)

    def _warn_once(self, fault: str) -> None:
        if fault not in self._faults:
            self._faults.add(fault)
            _log.warning(
                "activation cache on disk: %s; their samples are sent like new ones", fault
            )
