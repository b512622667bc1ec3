"""Trackio: one run over all resumes, in its own folder (`TRACKIO_DIR`); `trackio show` draws it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from thinpipe.launch.view.writers.writer import Destination


class TrackioWriter:
    """Trackio continues a run by its name, so the run's id is part of it."""

    def __init__(self, place: Destination) -> None:
        trackio: Any = import_module("trackio")  # slow to import
        self._run = trackio.init(
            project=place.project,
            name=f"{place.name}-{place.run_id}",
            resume="allow",
            config=dict(place.settings),
            embed=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


open_writer = TrackioWriter
