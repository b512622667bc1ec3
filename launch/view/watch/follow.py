"""Runs as their folders tell them, read again as they grow, and what is new since a moment."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinpipe.launch.view.report.compare import comparison
from thinpipe.launch.view.report.content import Json, Story, content, silence
from thinpipe.launch.view.report.journal import (
    GONE_S,
    METRICS,
    NOTES,
    STATE,
    Note,
    Told,
    is_gone,
    is_starting,
    read_notes,
    silent_s,
)
from thinpipe.launch.view.report.metrics import StepRecord, parse_record
from thinpipe.launch.view.report.rows import Rows
from thinpipe.launch.view.report.summary import summarize
from thinpipe.launch.view.report.timeline import FILE_NAME as TIMELINE
from thinpipe.launch.view.report.timeline import read_timeline

_GONE_EARLY = "the run's process is gone, before its first step"
_FILES = (METRICS, STATE, NOTES, TIMELINE, "summary.json")


@dataclass(frozen=True)
class Moment:
    """What a page shows of a run at one time; `series` changes where rows before are others."""

    number: int
    series: tuple[int, int]
    columns: dict[str, list[float | None]]
    parts: dict[str, str]  # as JSON
    _sent: dict[int, str] = field(default_factory=dict)

    def since(self, run: int, before: "Moment | None") -> str:
        """The message, as JSON, for a page that has shown `before`."""
        key = before.number if before else -1
        if key not in self._sent:
            self._sent[key] = self._message(run, before)
        return self._sent[key]

    def _message(self, run: int, before: "Moment | None") -> str:
        start, known = 0, before.parts if before else {}
        if before and before.series == self.series:
            start = max(0, len(before.columns["step"]) - 1)  # which may not have been full
        columns = {name: column[start:] for name, column in self.columns.items()}
        changed = (f'"{key}":{text}' for key, text in self.parts.items() if known.get(key) != text)
        parts = "{" + ",".join(changed) + "}"
        return f'{{"run":{run},"start":{start},"columns":{_json(columns)},"parts":{parts}}}'


class Followed:
    """A run's folder, read again when its files change."""

    def __init__(self, folder: Path) -> None:
        """Read what there is."""
        self.folder = folder
        self.moment: Moment | None = None
        """The newest one; None before the first step."""
        self.story: Story | None = None
        self.problem = ""
        """Why the folder cannot be read, if twice it could not."""
        self.patience_s = GONE_S
        """After the last step, before the lock of the folder is looked at."""
        self._restart()
        self._series = 0
        self._seen: list[Any] = []
        self._failed: list[Any] = []
        if not is_starting(folder):
            Told(folder)
        self.refresh(strict=True)

    def _restart(self) -> None:
        self._records: list[StepRecord] = []
        self._rows = Rows()
        self._offset, self._damaged = 0, 0

    @property
    def silence(self) -> str:
        return silence(self.story, silent_s(self.folder)) if self.story else ""

    @property
    def is_over(self) -> bool:
        return self.story is not None and self.story.ended is not None

    def refresh(self, *, strict: bool = False) -> bool:
        """Read what is new; whether there is more to tell. `strict` rejects damaged files."""
        seen = [_signature(self.folder / name) for name in _FILES]
        known = seen == self._seen and any(seen)  # nothing at all: a run that is just starting
        if known and (self.is_over or not is_gone(self.folder, self.patience_s)):
            return False
        try:
            self._read(seen[0], strict=strict)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            if strict:
                raise
            before, self._failed = self._failed, seen
            if seen != before or self.problem:  # while a file is being replaced, that is no problem
                return False
            self.problem = str(error) or type(error).__name__
            return True
        self._seen, self._failed, cleared, self.problem = seen, [], bool(self.problem), ""
        return cleared or self.moment is not None

    def _read(self, metrics: Any, *, strict: bool) -> None:
        """Of steps only those that were added, unless a resume has cut some off."""
        path = self.folder / METRICS
        if metrics is None:
            if not strict and not is_starting(self.folder) and not (self.folder / STATE).exists():
                raise ValueError(f"{self.folder}: {_GONE_EARLY}")
            return
        before = self._seen[0] if self._seen else None
        if metrics[1] < self._offset or (before is not None and before[0] != metrics[0]):
            self._restart()
            self._series += 1
        with path.open("rb") as file:
            file.seek(self._offset)
            *lines, rest = file.read().split(b"\n")
            self._offset = file.tell() - len(rest)
        for number, line in enumerate(lines, len(self._records) + self._damaged + 1):
            try:
                record = parse_record(line, f"{path}:{number}")
            except ValueError:
                if strict:
                    raise
                self._damaged += 1
                continue
            self._records.append(record)
            self._rows.add(record)
        if self._records:
            self._tell()
        elif not strict and is_gone(self.folder, self.patience_s):
            raise ValueError(f"{self.folder}: {_GONE_EARLY}")

    def _tell(self) -> None:
        told = Told(self.folder, patience_s=self.patience_s)
        notes = read_notes(self.folder)
        if self._damaged:
            text = f"warning: {self._damaged} damaged lines of {METRICS} are left out"
            notes = [*notes, Note(at_s=time.time(), step=0, kind="warning", text=text)]
        events = read_timeline(self.folder).events if (self.folder / TIMELINE).is_file() else ()
        summary = summarize(told.info, self._records, told.edges)
        about = (events, told.traces, told.places, notes, told.now, told.ended)
        silent = silent_s(self.folder)
        self.story = Story(told.info, self._records, summary, *about, silent)
        parts = {key: _json(part) for key, part in content(self.story, self._rows).items()}
        number = self.moment.number + 1 if self.moment else 0
        series = (self._series, self._rows.stride)
        self.moment = Moment(number, series, self._rows.columns(), parts)


def compared(runs: Sequence[Followed]) -> Json | None:
    """A message about all runs that have taken a step, if they are several and all have."""
    stories = [run.story for run in runs if run.story]
    return comparison(stories) if len(stories) == len(runs) > 1 else None


def _signature(path: Path) -> tuple[int, int, int] | None:
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
