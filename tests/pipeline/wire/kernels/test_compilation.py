"""Compiled code on disk: found again, replaced where it is damaged, and never needed."""

from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import pytest

from tests.disk import full_disk
from thinpipe.pipeline.wire.kernels.cpu import compilation


def _product(a: Any, b: Any) -> Any:
    return a * b


def _fresh() -> Any:
    """As another process would have it."""
    copied = FunctionType(_product.__code__, globals(), "_product")
    copied.__qualname__ = "_product"
    return compilation.compiled(copied)


def _used(found: Any) -> tuple[int, int]:
    """(hits, misses) of the cache, of a function that was called."""
    assert found(3, 5) == 15
    return sum(found.stats.cache_hits.values()), sum(found.stats.cache_misses.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place for code."""
    monkeypatch.setattr(compilation, "cache_folders", lambda: [tmp_path])
    return tmp_path


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:20],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: bytes(len(whole)),
        lambda whole: whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
    ],
    ids=["empty", "cut in the digest", "cut in half", "zeros", "one bit"],
)
def test_damaged_code_is_compiled_again_and_replaced(
    folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    assert _used(_fresh()) == (0, 1)
    assert _used(_fresh()) == (1, 0)
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert _used(_fresh()) == (0, 1)
    assert _used(_fresh()) == (1, 0)
    assert [*folder.iterdir()] == [file]


def test_without_room_code_is_compiled_in_memory_and_nothing_is_left(folder: Path) -> None:
    with full_disk():
        assert _used(_fresh()) == (0, 1)
        problem = compilation.why_nothing_is_kept()
    assert problem is not None
    assert problem.startswith(f"{folder}: ")
    assert [*folder.iterdir()] == []
    assert compilation.why_nothing_is_kept() is None


def test_code_is_found_where_nothing_can_be_written_and_kept_in_the_next_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setattr(compilation, "cache_folders", lambda: [blocked, tmp_path / "new" / "place"])
    assert _used(_fresh()) == (0, 1)
    assert _used(_fresh()) == (1, 0)
    monkeypatch.setattr(compilation, "cache_folders", lambda: [blocked])
    assert _used(_fresh()) == (0, 1)
    problem = compilation.why_nothing_is_kept()
    assert problem == f"{blocked}: File exists"


def test_the_users_choice_comes_first_and_an_unknown_home_is_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    beside = Path(compilation.__file__).parent / "__pycache__"
    assert compilation.cache_folders()[0] == tmp_path
    assert compilation.cache_folders()[-1] == beside
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no HOME, nobody in passwd
    assert compilation.cache_folders() == [tmp_path, beside]
