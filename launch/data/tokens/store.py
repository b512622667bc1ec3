"""What is made once on a host and kept in the user's cache: the first process makes it.

Others wait for it. If the one that makes it dies, the next goes on where it was; what is damaged is
made again.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from thinpipe.launch.data.token_file import DamagedError
from thinpipe.launch.host import disk
from thinpipe.launch.host.cache import CACHE, cache_folder
from thinpipe.launch.host.words import format_bytes

_log = logging.getLogger(__name__)
_TOKENS, _ROWS = "tokens", "rows"
"""Folders of the cache; the second has copies of rows that version 0.2 made."""
_POLL_S = 0.05  # so late it is noticed that another process is done
_SILENT_S = 300.0
"""A process that makes something shows every few seconds that it lives; else it is stuck."""
_ALIVE_S = 5.0  # sixty signs of life before others think that this process is stuck
_UNUSED_S = 30 * 86400.0
"""What no run has opened for so long is removed when something else is made."""

T = TypeVar("T")


def obtain(key: str, read: Callable[[Path], T], make: Callable[[Path], None], *, what: str) -> T:
    """What `read` finds in the cache under a key (hex), made by `make` if it is not there.

    `make` writes into a folder, which may hold what an interrupted one wrote; the folder gets its
    name when `make` returns. `read` raises FileNotFoundError or DamagedError. `what` is the setting
    that it is for.

    Raises:
        OSError: the cache cannot be written; the message has the remedy.
        TimeoutError: another process makes it, and has written nothing for minutes.
    """
    try:
        root = cache_folder() / _TOKENS
        root.mkdir(exist_ok=True)
        folder = root / key[:32]
        found = _read(folder, read)
        if found is None:
            with _alone(folder, what) as partial:
                found = _read(folder, read)  # made meanwhile
                if found is None:
                    _sweep(root)
                    _sweep(root.parent / _ROWS)
                    if not _is_whole(partial, read):
                        try:
                            with _alive(folder.with_suffix(".lock")):
                                make(partial)
                        except ValueError:  # an interruption leaves what was written for next time
                            shutil.rmtree(partial, ignore_errors=True)
                            raise
                    _settle(partial, folder)
                    found = read(folder)
        with contextlib.suppress(OSError):
            os.utime(folder)
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno is None:
            raise
        place = Path(error.filename) if error.filename else Path(os.environ.get(CACHE, "/"))
        remedy = f"{disk.why(error, place)}, or name another place in the environment: {CACHE}=..."
        raise OSError(f"{what}: its cache {place} cannot be written: {remedy}") from error
    return found


def key_of(*parts: object) -> str:
    """A key for what is made of these (JSON-able)."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check_room(folder: Path, nbytes: int, what: str) -> None:
    """Check that a disk has room for what is about to be made.

    Raises:
        OSError: it has not.
    """
    have = disk.free_nbytes(folder)
    held = sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0
    if nbytes - held > have:
        raise OSError(
            f"{what}: takes about {format_bytes(nbytes)} in {folder.parent}, which has "
            f"{format_bytes(have)} free; free disk space, or name another place in the "
            f"environment: {CACHE}=..."
        )


def says() -> bool:
    """Whether this process speaks for its host: one of several ranks does."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _read(folder: Path, read: Callable[[Path], T]) -> T | None:
    try:
        return read(folder)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        _log.warning("%s; it is made again", error)
        return None


def _is_whole(partial: Path, read: Callable[[Path], object]) -> bool:
    """Whether it was finished by a process that was killed before it gave it its name."""
    try:
        read(partial)
    except FileNotFoundError:
        return False
    except DamagedError:
        shutil.rmtree(partial)
        return False
    return True


def _settle(partial: Path, folder: Path) -> None:
    """Give what was made its name; what is damaged there goes."""
    if folder.exists():
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # another process did, where there are no locks
        partial.rename(folder)
    disk.flush_folder(folder.parent)


@contextlib.contextmanager
def _alone(folder: Path, what: str) -> Iterator[Path]:
    """The folder to write into, once no other process does; it stays after an interruption."""
    partial = folder.with_suffix(".partial")
    with folder.with_suffix(".lock").open("a", encoding="utf-8") as lock:
        seen, since, said = None, time.monotonic(), False
        while True:
            try:
                if not disk.lock(lock):  # none on this file system: each makes its own
                    partial = folder.with_suffix(f".{os.getpid()}.partial")
                break
            except BlockingIOError:
                pass
            if not said and says():
                _log.warning("%s: waiting for another process, which writes %s", what, partial)
            said = True
            if (now := (_signs(partial), os.fstat(lock.fileno()).st_mtime_ns)) != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > _SILENT_S:
                raise TimeoutError(
                    f"{what}: another process has {lock.name} and wrote nothing for "
                    f"{_SILENT_S:.0f} s; end it (`fuser {lock.name}` names it), or let it go on"
                )
            time.sleep(_POLL_S)
        yield partial
    # the lock's file stays: were it removed, two processes could each lock one of its name


@contextlib.contextmanager
def _alive(lock: Path) -> Iterator[None]:
    """Show that this process lives: it may read rows for long before it writes anything."""
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(_ALIVE_S):
            with contextlib.suppress(OSError):
                os.utime(lock)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _signs(folder: Path) -> list[tuple[str, int, int]]:
    with contextlib.suppress(OSError):
        states = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
        return [(name, state.st_size, state.st_mtime_ns) for name, state in states]
    return []


def _sweep(root: Path) -> None:
    """Remove what was not opened for a month, unless a process has it locked."""
    oldest = time.time() - _UNUSED_S
    for folder in [*root.iterdir()] if root.is_dir() else ():
        with contextlib.suppress(OSError):
            if folder.suffix == ".lock" or folder.stat().st_mtime > oldest:
                continue
            with folder.with_suffix(".lock").open("a", encoding="utf-8") as lock:
                if disk.lock(lock):
                    shutil.rmtree(folder)
