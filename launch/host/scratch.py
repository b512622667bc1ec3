"""Temporary files of a launcher: gone when it ends, and if it was killed, when the next one starts.

Sockets and logs of processes are in one folder, which its launcher has locked as long as it lives.
"""

import contextlib
import fcntl
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TextIO

_PREFIX, _LOCK = "thinpipe-run-", "lock"
_AFTER_MULTIPROCESSING = -200
"""Its own folder, which lies in this one, is removed at -100."""


def use_scratch_folder() -> Path:
    """Have `tempfile` use a folder of this process alone, removed when it exits.

    Those of launchers that were killed are removed first.
    """
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = (folder / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    tempfile.tempdir = str(folder)
    Finalize(None, _remove, args=(folder, lock), exitpriority=_AFTER_MULTIPROCESSING)
    return folder


def _remove(folder: Path, lock: TextIO) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _sweep(root: Path) -> None:
    """Remove folders that nobody has locked; others' are left alone."""
    for folder in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
