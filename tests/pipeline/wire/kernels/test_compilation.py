"""Compiled code on disk: found again, replaced where it is damaged, and never needed."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import pytest

from tests.disk import full_disk
from tests.ranks import run_ranks
from tests.waiting import until
from thinpipe.pipeline.wire.kernels.cpu import compilation, kept


def _product(a: Any, b: Any) -> Any:
    return a * b


def _product_in_another(a: Any, b: Any) -> Any:
    return _inner(a, b)


def _fresh(function: Any = _product) -> Any:
    """As another process would have it."""
    copied = FunctionType(function.__code__, globals(), function.__name__)
    copied.__qualname__ = function.__name__
    return compilation.compiled(copied)


_inner = _fresh()


def _used(found: Any) -> tuple[int, int]:
    """(hits, misses) of the cache, of a function that was called."""
    assert found(3, 5) == 15
    return sum(found.stats.cache_hits.values()), sum(found.stats.cache_misses.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place for code."""
    monkeypatch.setattr(kept, "cache_folders", lambda: [tmp_path])
    return tmp_path


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:20],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
    ],
    ids=["cut in the digest", "cut in half", "one bit"],
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
        problem = kept.why_nothing_is_kept()
    assert problem is not None
    assert problem.startswith(f"{folder}: ")
    assert [*folder.iterdir()] == []
    assert kept.why_nothing_is_kept() is None


def test_code_is_found_where_nothing_can_be_written_and_kept_in_the_next_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setattr(kept, "cache_folders", lambda: [blocked, tmp_path / "new" / "place"])
    assert _used(_fresh()) == (0, 1)
    assert _used(_fresh()) == (1, 0)
    monkeypatch.setattr(kept, "cache_folders", lambda: [blocked])
    assert _used(_fresh()) == (0, 1)
    problem = kept.why_nothing_is_kept()
    assert problem == f"{blocked}: File exists"


def _compile_together(rank: int, folder: Path) -> int:
    """How many variants this process compiled."""
    kept.cache_folders = lambda: [folder / "code"]
    product = _fresh()
    (folder / f"ready {rank}").touch()
    until(lambda: len([*folder.glob("ready *")]) == 2)
    return _used(product)[1]


@pytest.mark.dist
def test_of_two_processes_one_compiles_and_the_other_waits_for_its_code(tmp_path: Path) -> None:
    assert sorted(run_ranks(2, _compile_together, tmp_path)) == [0, 1]
    assert len([*(tmp_path / "code").iterdir()]) == 1  # locks are gone


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        (_product_in_another, "types that do not fit"),
        (_product_in_another, "Ctrl-C"),
        (_product, "cannot be kept"),
    ],
)
def test_code_that_cannot_be_compiled_keeps_no_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: Any, failure: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    arguments: tuple[Any, Any] = ("a", "b") if failure == "types that do not fit" else (3, 5j)
    if failure == "Ctrl-C":
        monkeypatch.setattr(numba.core.compiler, "compile_extra", interrupt)
    if failure == "cannot be kept":
        monkeypatch.setattr(compilation, "dumps", interrupt)
    kernel = _fresh(function)
    with pytest.raises((KeyboardInterrupt, numba.TypingError)):
        kernel(*arguments)
    assert not [*folder.glob("*.lock")]
    assert not kernel._cache._locks
    assert not _inner._cache._locks


def test_without_locks_or_past_the_deadline_a_process_compiles_by_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _used(_fresh())
    (code,) = folder.iterdir()
    code.unlink()
    monkeypatch.setattr(compilation, "_LONGEST_WAIT_S", 0.1)
    with (folder / f"{code.name}.lock").open("w") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        assert _used(_fresh()) == (0, 1)
    code.unlink()

    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert _used(_fresh()) == (0, 1)
    assert [*folder.iterdir()] == [code]


def test_the_users_choice_comes_first_and_an_unknown_home_is_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    next_to_ours = Path(compilation.__file__).parent / "__pycache__"
    assert kept.cache_folders()[0] == tmp_path
    assert kept.cache_folders()[-1] == next_to_ours
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no HOME, nobody in passwd
    assert kept.cache_folders() == [tmp_path, next_to_ours]
