"""How far something that takes long has come: share done, rate, time left."""

import logging
import time
from pathlib import Path

from thinpipe.launch.host.words import format_bytes, format_duration

_log = logging.getLogger(__name__)
_FIRST_S, _EVERY_S = 2.0, 10.0  # what is over sooner says nothing


class Progress:
    """Says how many of `total` bytes or rows are done, after two seconds, then every ten."""

    def __init__(self, what: str, total: int, done: int = 0, *, unit: str = "bytes") -> None:
        self._unit = unit
        self._what, self._total, self._first = what, max(1, total), done
        self._start = self._said = time.monotonic()
        self._due_s = _FIRST_S

    def at(self, done: int) -> None:
        now = time.monotonic()
        if now - self._said < self._due_s:
            return
        self._said, self._due_s = now, _EVERY_S
        rate = (done - self._first) / (now - self._start)
        left = f", {format_duration((self._total - done) / rate)} left" if rate > 0 else ""
        share = min(1.0, done / self._total)
        speed = format_bytes(int(rate)) if self._unit == "bytes" else f"{rate:.0f} {self._unit}"
        _log.warning("%s: %.0f %%, %s/s%s", self._what, 100 * share, speed, left)

    def finished(self, folder: Path) -> None:
        seconds = time.monotonic() - self._start
        if seconds >= _FIRST_S:
            nbytes = sum(file.stat().st_size for file in folder.iterdir())
            _log.warning(
                "%s: done in %s; %s are kept in %s",
                self._what,
                format_duration(seconds),
                format_bytes(nbytes),
                folder.with_suffix(""),
            )
