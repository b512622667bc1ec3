"""The contract of a tool that keeps a run's numbers."""

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

from thinpipe.launch.host import disk

CLOSE_S = 30.0
"""How long the end of a run waits for a tool."""
_MOST_WAITING = 10_000  # steps in RAM; a tool that is further behind gets no more

_log = logging.getLogger(__name__)
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


class WriterThread:
    """A tool, opened and fed by a thread of its own; a context manager around the training.

    A tool that fails, does not keep up, or does not finish within `close_s` seconds is a warning,
    and gets no more steps.
    """

    def __init__(
        self, tool: str, open_writer: Callable[[], Writer], *, close_s: float = CLOSE_S
    ) -> None:
        self._tool, self._open, self._close_s = tool, open_writer, close_s
        self._steps: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(
            _MOST_WAITING
        )
        self._over, self._giving_up = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"writer-{tool}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._over.is_set():
            return
        self._put(None)
        self._thread.join(self._close_s)
        if self._thread.is_alive() and not self._over.is_set():
            self._give_up(f"did not finish within {self._close_s:.0f} s")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if not self._over.is_set():
            self._put((step, values))

    def _put(self, item: tuple[int, Mapping[str, float]] | None) -> None:
        try:
            self._steps.put_nowait(item)
        except queue.Full:
            self._give_up(f"does not keep up, {_MOST_WAITING:,} steps wait")

    def _run(self) -> None:
        try:
            writer = self._open()
            while (item := self._steps.get()) is not None and not self._over.is_set():
                writer.write(*item)
            writer.close()
        except Exception as error:  # whatever another tool raises must not end the training
            self._give_up(str(error) or type(error).__name__)

    def _give_up(self, reason: str) -> None:
        with self._giving_up:
            if self._over.is_set():
                return
            first = reason.strip().splitlines()[0]
            _log.warning(
                "warning: %s: %s; it gets no more steps, metrics.jsonl does", self._tool, first
            )
            self._over.set()  # after the warning: whoever sees it may end the process
