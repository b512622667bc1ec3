"""Rows on disk: what comes back is what was put, or it is said to be lost."""

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aqsgd.delays import delay
from tests.disk import full_disk
from tests.ranks import run_ranks
from thinpipe.aqsgd.disk import DiskStore, RowFile
from thinpipe.aqsgd.store import LostRowError

NBYTES = 4096

OpenStore = Callable[[], DiskStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    opened: list[DiskStore] = []

    def make() -> DiskStore:
        opened.append(DiskStore(RowFile(tmp_path / "rows", NBYTES)))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def row(value: int) -> Tensor:
    return torch.full((NBYTES,), value % 251, dtype=torch.uint8)


def put(store: DiskStore, values: dict[int, int]) -> None:
    """A step that stores these values, and one more so that they are on disk."""
    for sample, value in values.items():
        store.put(sample, row(value))
    store.end_step()
    store.end_step()


def fetched(store: DiskStore, samples: list[int]) -> None:
    store.prefetch(samples)
    store.end_step()


def test_rows_come_back_after_many_steps(open_store: OpenStore) -> None:
    store = open_store()
    put(store, {4: 40, 9: 90, 2: 20})
    fetched(store, [9, 2])
    assert torch.equal(store.row(9), row(90))
    assert torch.equal(store.row(2), row(20))
    assert torch.equal(store.row(4), row(40))  # not announced: read now


def test_the_place_of_a_dropped_sample_is_used_again(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store()
    put(store, {1: 10, 2: 20})
    store.drop(1)
    put(store, {3: 30})
    packed, place, _ = store.pack([2, 3])
    assert place.tolist() == [1, 0]
    assert packed.numel() == 2 * NBYTES
    fetched(store, [2, 3])
    assert torch.equal(store.row(3), row(30))
    assert torch.equal(store.row(2), row(20))


def test_the_file_needs_no_cleaning_up(open_store: OpenStore, tmp_path: Path) -> None:
    """However the process ends: it has no name."""
    put(open_store(), {1: 10})
    assert list((tmp_path / "rows").iterdir()) == []


def flip(file: RowFile, number: int) -> None:
    byte = os.pread(file.descriptor, 1, number * NBYTES + 77)
    os.pwrite(file.descriptor, bytes([byte[0] ^ 4]), number * NBYTES + 77)


def truncate(file: RowFile, number: int) -> None:
    os.ftruncate(file.descriptor, number * NBYTES + 99)


@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_damaged_row_is_noticed_when_it_is_fetched(
    open_store: OpenStore, damage: Callable[[RowFile, int], None]
) -> None:
    store = open_store()
    put(store, {1: 10, 2: 20})
    damage(store._file, 1)
    store.prefetch([1, 2])
    assert [store.is_lost(1), store.is_lost(2)] == [False, True]
    packed, place, _ = store.pack([1, 2])
    assert packed.numel() == 2 * NBYTES
    assert place.tolist() == [0, 1]
    store.end_step()
    with pytest.raises(LostRowError, match="sample 2 are damaged"):
        store.row(2)


class Faulty:
    """Makes a method of a file raise for some rows."""

    def __init__(self, method: Any, code: int, rows: set[int]) -> None:
        self.method, self.code, self.rows = method, code, rows

    def __call__(self, number: int, *rest: Any) -> Any:
        if number in self.rows:
            raise OSError(self.code, os.strerror(self.code))
        return self.method(number, *rest)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_row_that_cannot_be_written_is_lost_until_it_is_written_again(
    open_store: OpenStore, code: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    store = open_store()
    with monkeypatch.context() as broken:
        broken.setattr(store._file, "write", Faulty(store._file.write, code, {1}))
        put(store, {1: 10, 2: 20})
    store.prefetch([1, 2])
    assert [store.is_lost(1), store.is_lost(2)] == [False, True]
    assert os.strerror(code) in caplog.text
    store.end_step()
    put(store, {2: 21})
    store.prefetch([2])
    assert not store.is_lost(2)


def test_a_row_that_cannot_be_read_is_lost(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    put(store, {1: 10})
    monkeypatch.setattr(store._file, "read", Faulty(store._file.read, errno.EIO, {0}))
    store.prefetch([1])
    assert store.is_lost(1)


def limited(rank: int, folder: str) -> list[bool]:
    with full_disk(2 * NBYTES + 100):
        store = DiskStore(RowFile(Path(folder), NBYTES))
        with pytest.raises(OSError, match="File too large"):
            store.reserve(3)
        put(store, {1: 10, 2: 20, 3: 30})
        store.prefetch([1, 2, 3])
        found = [store.is_lost(sample) for sample in (1, 2, 3)]
        store.close()
    return found


@pytest.mark.dist
def test_a_file_at_its_limit_loses_what_does_not_fit(tmp_path: Path) -> None:
    assert run_ranks(1, limited, str(tmp_path)) == [[False, False, True]]


@pytest.mark.slow
def test_a_full_disk_is_noticed_before_the_first_step(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from thinpipe.aqsgd.disk import RowFile\n"
        f"file = RowFile(Path({str(tmp_path)!r}), 4096); file.reserve(10); print('fits')\n"
        "file.reserve(1000)"
    )
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c "$CODE"'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mount],
        env={**os.environ, "CODE": code},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "fits" not in done.stdout and "unshare" in done.stderr:
        pytest.skip(f"no private mounts here: {done.stderr}")
    assert "fits" in done.stdout, done.stderr
    assert "No space left on device" in done.stderr


def test_reads_and_writes_under_random_delays_never_mix_samples_up(open_store: OpenStore) -> None:
    """The published code's race: a prefetch that shares buffers with the writes of its step."""
    store, dice = open_store(), random.Random(3)
    delay(store._file, "read", "write", dice=dice, most_s=2e-3)
    value: dict[int, int] = {}
    coming = dice.sample(range(12), 4)
    for step in range(120):
        now, coming = coming, dice.sample(range(12), 4)
        store.prefetch(coming)
        lent = {sample: store.row(sample) for sample in now if sample in value}
        keep = dice.random() < 0.8
        for sample in now if keep else ():
            value[sample] = step
            store.put(sample, row(step))
        for sample, old in lent.items():  # a row that was lent never changes
            assert len(set(old.tolist())) == 1, sample
        before = {sample: int(old[0]) for sample, old in lent.items()}
        store.end_step()
        assert before == {sample: int(old[0]) for sample, old in lent.items()}
        for sample in coming:
            if sample in value:
                assert torch.equal(store.row(sample), row(value[sample])), (step, sample)
