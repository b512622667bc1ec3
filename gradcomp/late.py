"""What step t found is exchanged during step t + 1.

It counts once t + 1 counts; until then nothing changes. If t + 1 is given up, it is exchanged
again, maybe with other replicas.
"""

from collections.abc import Callable
from typing import Any

from thinpipe.gradcomp.overlap import Overlap


class LateExchange:
    """The exchange after a step, if one follows it."""

    def __init__(self, overlap: Overlap, launch: Callable[[Any], None]) -> None:
        """`launch` has `overlap` exchange what is pending, and leaves that as it is."""
        self._overlap, self._launch = overlap, launch
        self.pending: Any = None
        """What is to be exchanged; None if nothing is."""
        self._found: list[Any] | None = None

    def begin(self) -> None:
        """As a step begins."""
        if self.pending is not None and self._found is None and self._overlap.is_empty:
            self._launch(self.pending)

    def wait(self) -> list[Any]:
        """What was found, in the order of the jobs; nothing if nothing was exchanged."""
        if self.pending is not None and self._found is None:
            self.begin()
            self._found = self._overlap.join()
        return self._found or []

    def take(self) -> list[Any]:
        """What `wait` found; it counts from now on."""
        found, self._found = self._found, None
        if found is not None:
            self.pending = None
        return found or []

    def abandon(self) -> None:
        self._overlap.abandon()
        self._found = None
