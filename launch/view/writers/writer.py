"""The contract of a tool that keeps a run's numbers."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from thinpipe.launch.host import disk

_ID_FILE = "run_id"


class Writer(Protocol):
    """Keeps numbers of steps. All calls come from one thread; whatever is raised ends it."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers of a step, counted from 1."""

    def close(self) -> None:
        """Write what is held."""


@dataclass(frozen=True)
class Destination:
    """Where a run's numbers go.

    `run_id` is the same after a resume. Steps up to `done` are there already; later ones may be,
    from before the resume.
    """

    folder: Path
    name: str
    project: str
    run_id: str
    done: int
    settings: Mapping[str, Any]


def destination(
    folder: Path, name: str, project: str, settings: Mapping[str, Any], done: int | None
) -> Destination:
    """Of a new run, or (`done` is not None) of one resumed after that many steps."""
    file, run_id = folder / _ID_FILE, secrets.token_hex(4)
    try:
        if done is not None and file.exists():
            run_id = file.read_text(encoding="utf-8").strip()
        else:
            file.write_text(run_id, encoding="utf-8")
    except OSError as error:
        disk.warn_once("writers", f"{file}: {disk.why(error, file)}; a resume begins new curves")
    return Destination(folder, name, project, run_id, done or 0, settings)


def open_writer(tool: str, place: Destination) -> Writer:
    """Imports the tool; some take seconds."""
    writer: Writer = import_module(f"thinpipe.launch.view.writers.{tool}").open_writer(place)
    return writer
