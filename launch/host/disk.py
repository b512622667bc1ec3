"""What file systems cannot do, and why one could not write: the cause, and its own remedy.

NFS, Lustre and FSx may have no locks, CIFS, sshfs and the mounts of containers no fsync of folders,
and what stands before an object store no rename over a file. None of it is a reason to stop.
"""

import errno
import fcntl
import json
import logging
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_log = logging.getLogger(__name__)
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF}
_OCCUPIED = {errno.EEXIST, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP}
_REMEDIES = {
    errno.EDQUOT: "remove files of yours there, or have the quota raised",
    errno.EROFS: "name a folder that is not mounted read-only",
    errno.EACCES: "name a folder that this user can write, or correct its owner or mode (ls -l)",
    errno.EPERM: "name a folder that this user can write, or correct its owner or mode (ls -l)",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EIO: "the disk or its connection fails (dmesg shows it); name another one",
    errno.ESTALE: "the file server has lost it; mount it again",
}
_said: set[str] = set()
RUN_LOCK = ".lock"
"""In a run's folder: who trains there holds its lock."""


def why(error: OSError, place: Path | None = None) -> str:
    """An error of writing as "cause; remedy"; `place` is a file or folder on that disk."""
    cause = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        if place is not None and not has_inodes(place):
            return f"{cause}: its file system has no inodes left; remove files, however small"
        return f"{cause}; free disk space"
    if error.errno == errno.EFBIG:
        limit = file_size_limit()
        if limit is None:
            return f"{cause}; name a folder on a file system that takes larger files"
        return f"{cause}: `ulimit -f` allows {limit:,} bytes; raise it (`ulimit -f unlimited`)"
    return f"{cause}; {_REMEDIES.get(error.errno or 0, 'name another folder')}"


def file_size_limit() -> int | None:
    """The most bytes that a file of this process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def free_nbytes(place: Path) -> int:
    """Bytes that are free on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(existing(place)).free


def has_inodes(place: Path) -> bool:
    """False only if the file system counts them and has none."""
    found = os.statvfs(existing(place))
    return not found.f_files or bool(found.f_favail)


def lock(file: IO[Any]) -> bool:
    """Lock an open file as long as it is open; False if its file system has no locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    return _supported(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))


def is_locked(path: Path) -> bool | None:
    """Whether a process holds a file's lock; None if it is missing, or if nobody can say.

    If none does, this one does for a moment.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


@dataclass(frozen=True)
class RunOwner:
    """Who trains in a run's folder, as its lock says."""

    run: int
    process: int
    host: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, run {self.run:016x}"


def run_owner(folder: Path) -> RunOwner | None:
    """The last one who locked a run's folder, if it can be read."""
    try:
        return RunOwner(**json.loads((folder / RUN_LOCK).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def flush(descriptor: int) -> None:
    """Have a file on disk."""
    _supported(lambda: os.fsync(descriptor))


def flush_folder(folder: Path) -> None:
    """Have the names in a folder on disk; one warning where the file system cannot do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        done = _supported(lambda: os.fsync(descriptor))
    finally:
        os.close(descriptor)
    if not done:
        warn_once(
            "flush",
            f"{folder}: its file system cannot flush a folder: what was saved last may be lost if "
            "this machine loses power, not if the run fails",
        )


def replace(source: Path, target: Path) -> None:
    """Rename over a file; where that fails, the old file is removed first."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno not in _OCCUPIED or not target.is_file():
            raise
        target.unlink()
        source.rename(target)


def warn_once(kind: str, text: str) -> None:
    """A warning, if it is the first of its kind, by the first of a host's ranks."""
    if kind not in _said and os.environ.get("LOCAL_RANK", "0") == "0":
        _log.warning("warning: %s", text)
    _said.add(kind)


def _supported(act: Callable[[], object]) -> bool:
    """Do what a file system may lack; whether it does not."""
    try:
        act()
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True
