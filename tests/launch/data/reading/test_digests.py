"""Digests of large files: remembered where that can be, and read anew where it cannot."""

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.disk import full_disk
from thinpipe.launch.data.documents import Document, Listed
from thinpipe.launch.data.reading import digests
from thinpipe.launch.host.cache import CACHE

OLD_S = 1_000_000_000


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that counts as large and settled, and a cache of its own."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_REMEMBERED_NBYTES", 1)
    path = tmp_path / "text.txt"
    path.write_text("as it was", encoding="utf-8")
    os.utime(path, (OLD_S, OLD_S))
    return path


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read from now on."""
    read: list[Path] = []
    whole = digests._digest
    monkeypatch.setattr(digests, "_SETTLED_S", -1e12)
    monkeypatch.setattr(digests, "_digest", lambda path: read.append(path) or whole(path))
    return read


def test_a_file_is_read_once_also_where_the_cache_cannot_be_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = counted(monkeypatch)
    first = digests.digest_of(file)

    opened = Path.open

    def read_only(path: Path, mode: str = "r", *more: Any, **options: Any) -> Any:
        if "a" in mode:
            raise PermissionError(13, "read-only")
        return opened(path, mode, *more, **options)

    monkeypatch.setattr(Path, "open", read_only)
    assert digests.digest_of(file) == first
    assert read == [file]


@pytest.mark.parametrize("content", ["", "7", '[1, "x"]', '[[], "x", "late"]', "{"])
def test_a_damaged_note_is_made_anew(
    content: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = counted(monkeypatch)
    first = digests.digest_of(file)
    (note,) = (file.parent / "cache" / "digests").iterdir()
    note.write_text(content, encoding="utf-8")
    assert [digests.digest_of(file) for _ in "12"] == [first, first]
    assert read == [file, file]


def test_a_process_that_holds_the_lock_for_ever_is_not_waited_for_as_long(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = counted(monkeypatch)
    first = digests.digest_of(file)
    (note,) = (file.parent / "cache" / "digests").iterdir()
    note.write_text("", encoding="utf-8")
    monkeypatch.setattr(digests, "_LONGEST_WAIT_S", 0.1)
    with note.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert digests.digest_of(file) == first
    assert read == [file, file]


def test_a_full_disk_is_no_reason_to_fail(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = counted(monkeypatch)
    with full_disk(0):
        found = [digests.digest_of(file) for _ in "12"]
    assert found[0] == found[1]
    assert read == [file, file]


def test_listed_documents_have_a_digest_of_their_content() -> None:
    tokens = [Document(np.array(ids, dtype=np.int32)) for ids in ([1, 2], [3], [1], [2, 3])]
    found = {Listed(each).digest for each in (tokens[:2], tokens[2:], tokens[:1])}
    assert len(found) == 3
    assert Listed(tokens[:2]).digest == Listed(list(tokens[:2])).digest
