"""Temporary files of a launcher: gone when it ends, and if it was killed, when the next one starts.

Sockets and logs of processes are in one folder, which its launcher has locked as long as it lives.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TextIO

from thinpipe.launch.host import disk

_PREFIX, _LOCK = "thinpipe-run-", "lock"
_SHORT, _MEMORY, _LONGEST = Path("/tmp"), Path("/dev/shm"), 108 - 60
"""The name of a socket has at most 107 bytes; ours add up to 60 to the folder's."""
_AFTER_MULTIPROCESSING = -200  # its own folder, which lies in this one, is removed at -100


def use_scratch_folder() -> Path:
    """Have `tempfile` use a folder of this process alone, removed when it exits.

    Those of launchers that were killed are removed first.
    """
    root = _root()
    _sweep(root)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    lock = (folder / "new").open("w", encoding="utf-8")
    disk.lock(lock)
    (folder / "new").rename(folder / _LOCK)  # or one that starts now would find it free
    tempfile.tempdir = str(folder)
    Finalize(None, _remove, args=(folder, lock), exitpriority=_AFTER_MULTIPROCESSING)
    return folder


def remove_scratch_folder() -> None:
    """Remove it now, if there is one: before an exit that skips what is done at exits."""
    folder = Path(tempfile.tempdir or "")  # not gettempdir(), which may fail on a full disk
    if folder.name.startswith(_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def tmpdir_notice() -> str | None:
    """What to know where temporary files do not go where TMPDIR says."""
    wanted = os.environ.get("TMPDIR")
    if not wanted or _takes_sockets(Path(wanted)):
        return None
    return (
        f"note: TMPDIR = {wanted}: no folder that can be written, or its path has more than "
        f"{_LONGEST} bytes, too long for sockets; temporary files go elsewhere"
    )


def _takes_sockets(place: Path) -> bool:
    return len(os.fsencode(place)) <= _LONGEST and os.access(place, os.W_OK | os.X_OK)


def _root() -> Path:
    """Where temporary files go; a path too long for the names of sockets in it is passed over.

    /dev/shm is for containers in which all else is read-only.
    """
    places = [_SHORT, _MEMORY]
    with contextlib.suppress(FileNotFoundError):
        places.insert(0, Path(tempfile.gettempdir()))
    for place in places:
        if _takes_sockets(place):
            return place
    raise OSError(errno.EROFS, "no folder with a short path can be written")


def _remove(folder: Path, lock: TextIO) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _sweep(root: Path) -> None:
    """Remove folders that nobody has locked; others' are left alone."""
    for folder in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+", encoding="utf-8") as lock:
            if disk.lock(lock):  # without locks, nobody knows whose it is
                shutil.rmtree(folder, ignore_errors=True)
