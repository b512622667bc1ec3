"""`thinpipe stop`: end a run from any of its machines."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import psutil
import typer

from thinpipe.launch.config.cli_options import reject
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host import disk
from thinpipe.launch.host.signals import STOP_ALL


def stop(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder on this machine.")],
) -> None:
    """Save after a step that is soon, and end the run on all of its machines."""
    try:
        os.kill(_trains_in(folder), STOP_ALL)
    except ValueError as error:
        reject(error)
    except OSError as error:
        reject(ConfigError(f"{folder}: its process cannot be asked: {error.strerror}"))
    typer.echo("asked to stop: all ranks save after the same step, then the run ends")


def _trains_in(folder: Path) -> int:
    """The process that trains in a folder."""
    lock = folder / disk.RUN_LOCK
    if disk.is_locked(lock) is False or not lock.is_file():
        raise ConfigError(f"{folder}: no run is training there; name the folder of one that is")
    if (owner := disk.run_owner(folder)) is None:
        raise ConfigError(f"{folder}: does not say which process trains there")
    if owner.host != socket.gethostname():
        raise ConfigError(f"{folder}: its run trains on {owner.host}; stop it there")
    if not _holds(owner.process, lock):
        raise ConfigError(
            f"{folder}: process {owner.process}, which it names, is not its run's; press Ctrl-C "
            "where the run was started"
        )
    return owner.process


def _holds(process: int, lock: Path) -> bool:
    """Whether a process has a file open: another one may have its number, as in a container."""
    with suppress(psutil.Error):
        return any(
            Path(file.path) == lock.resolve() for file in psutil.Process(process).open_files()
        )
    return False
