"""The run folder: locked by one run at a time, never mixed with an earlier run's."""

import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host import disk
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.session import Session

_log = logging.getLogger(__name__)
_MOMENT_S = 0.1  # by then a look at a lock (`disk.is_locked`) is over
_RESULTS = ("config.toml", "metrics.jsonl", "checkpoints")


def check_folder(path: Path, name: str = "run.folder") -> None:
    """Check that a folder can be at `path`, which comes from the setting or option `name`.

    Raises:
        ConfigError: it is a file, or below one, or in a folder that cannot be written.
    """
    try:
        nearest = disk.existing(path)
        if nearest.is_dir() and not os.access(nearest, os.W_OK | os.X_OK):
            read_only = os.statvfs(nearest).f_flag & os.ST_RDONLY
            code = errno.EROFS if read_only else errno.EACCES
            raise OSError(code, os.strerror(code))
    except OSError as error:
        raise ConfigError(f"{name} = {path}: {disk.why(error)}") from error
    if not nearest.is_dir():
        what = "it" if nearest == path else str(nearest)
        raise ConfigError(f"{name} = {path}: {what} is a file; name another folder, or move it")


def check_contents(path: Path) -> None:
    """Check that a run can begin in a folder, where one may have been before.

    Raises:
        ConfigError: it holds files that are not a run's, or cannot be read.
    """
    try:
        is_foreign = (
            path.exists() and any(path.iterdir()) and not _has(path, disk.RUN_LOCK, *_RESULTS)
        )
    except OSError as error:
        raise ConfigError(f"run.folder = {path}: {disk.why(error, path)}") from error
    if is_foreign:
        raise ConfigError(
            f"run.folder = {path}: holds files that are not a run's; choose another folder"
        )


class RunFolder:
    """Locks the folder until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: TextIOWrapper | None = None
        self._aside: Path | None = None

    def acquire(self, session: Session, *, resume: bool) -> None:
        """Lock the folder for this run on every host; an earlier run's folder is renamed.

        Raises:
            ConfigError: on every rank, if on one host the folder is in use by another run, holds
                files that are not a run's, or cannot be written.
        """
        everyone = [session.mesh.rank == 0, session.mesh.rank > 0 and session.local_rank == 0]
        for my_turn in everyone:  # rank 0 first: hosts may share the disk
            problem = self._try(session.run_id, resume=resume) if my_turn else None
            problems = [text for text in gather_json(session.transport, problem) if text]
            if problems:
                raise ConfigError(problems[0])

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def put_back(self) -> None:
        """Undo `acquire` for a rejected run: the earlier one gets its folder back, if possible.

        Not where a restart would follow: it would resume the earlier run.
        """
        aside = self._aside
        if aside is None or _has(self._path, *_RESULTS):
            return
        with contextlib.suppress(OSError):
            shutil.rmtree(self._path)
            aside.rename(self._path)
            _log.warning("nothing was trained; %s was renamed back to %s", aside, self._path)

    def _try(self, run: int, *, resume: bool) -> str | None:
        path, me = self._path, disk.RunOwner(run, os.getpid(), socket.gethostname())
        try:
            with contextlib.ExitStack() as until_acquired:
                before = _lock(path, me) if (path / disk.RUN_LOCK).exists() else None
                if before is not None and not resume:
                    until_acquired.enter_context(before)  # no other run moves or locks it
                if path.exists() and any(path.iterdir()) and not resume:
                    check_contents(path)
                    self._aside = _move_aside(path)
                path.mkdir(parents=True, exist_ok=True)
                self._lock = before if before is not None and resume else _lock(path, me)
        except BlockingIOError:
            owner = disk.run_owner(path)
            if owner is not None and owner.run == run:  # another host of it, on a shared disk
                return None
            who = f" ({owner}); end it, or choose another folder" if owner else ""
            return f"run.folder = {path}: another run is using it{who}"
        except OSError as error:
            return f"run.folder = {path}: {disk.why(error, path)}"
        except ConfigError as error:
            return str(error)
        return None


def _lock(folder: Path, me: disk.RunOwner) -> TextIOWrapper:
    """Lock the folder, with this run as its owner, while the returned file is open."""
    path = folder / disk.RUN_LOCK
    file = path.open("a", encoding="utf-8")  # keeps another run's name while it holds the lock
    try:
        if not _locked(file):
            disk.warn_once(
                "lock", f"{folder}: its file system has no locks; start no other run in it"
            )
        if not (path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())):
            raise BlockingIOError(errno.EAGAIN, "moved by another run")
        file.truncate(0)
        file.write(json.dumps(asdict(me)))
        file.flush()
        disk.flush(file.fileno())  # for hosts that share the disk
    except OSError:
        file.close()
        raise
    return file


def _locked(file: TextIOWrapper) -> bool:
    """As `disk.lock`, twice: who looks whether a folder is locked holds its lock for a moment."""
    with contextlib.suppress(BlockingIOError):
        return disk.lock(file)
    time.sleep(_MOMENT_S)
    return disk.lock(file)


def _has(path: Path, *names: str) -> bool:
    return any((path / name).exists() for name in names)


def _move_aside(path: Path) -> Path:
    older = next(older for older in _renamed(path) if not older.exists())
    path.rename(older)
    _log.warning("%s held an earlier run and was renamed to %s", path, older)
    return older


def _renamed(path: Path) -> Iterator[Path]:
    """Where earlier runs in a folder have gone, first to last, and will go."""
    return (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))


def earlier_runs(path: Path) -> list[Path]:
    """Runs that were in a folder before the present one, first to last."""
    return list(itertools.takewhile(Path.exists, _renamed(path)))
