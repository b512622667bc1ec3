"""`thinpipe stop`: end a run from any of its machines."""

import json
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from thinpipe.launch.config.cli_options import refuse
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
        refuse(error)
    except OSError as error:
        refuse(ConfigError(f"{folder}: its process cannot be asked: {error.strerror}"))
    typer.echo("asked to stop: all ranks save after the same step, then the run ends")


def _trains_in(folder: Path) -> int:
    """The process that trains in a folder.

    Raises:
        ConfigError: none does, or not on this machine.
    """
    if not disk.is_locked(folder / disk.RUN_LOCK):  # or nobody can tell
        raise ConfigError(f"{folder}: no run is training there; name the folder of one that is")
    try:
        owner = json.loads((folder / disk.RUN_LOCK).read_text(encoding="utf-8"))
        host, process = str(owner["host"]), int(owner["process"])
    except (OSError, ValueError, TypeError, KeyError):
        raise ConfigError(f"{folder}: does not say which process trains there") from None
    if host != socket.gethostname():
        raise ConfigError(f"{folder}: its run trains on {host}; stop it there")
    return process
