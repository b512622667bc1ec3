"""Saving as one transaction of all machines, in two phases.

First every machine writes its parts and the manifest of all parts, and flushes them (prepare). Only
when all have, each gives its folder its name (publish); only when all have done that, each removes
older steps (settle). Killed at any moment, every machine holds a whole step: before the last
machine has prepared the older one, afterwards the new one too, which restoring completes.

A failed write is not an error here but a vote: all machines then drop the step.

After ranks were lost, one of those left may save a step which another has passed. So they first
compare steps: a rank that saves an earlier one drops it, and the others wait for its next save.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.copies import run_transfers, second_copies
from thinpipe.launch.checkpoint.manifest import CheckpointError, Manifest, Part
from thinpipe.launch.host import disk
from thinpipe.pipeline.comm.transport import Peers

_log = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]
"""Every rank's JSON value, in rank order, on every rank."""


@dataclass(frozen=True)
class Place:
    """A rank's place in a save: `hosts` is the first rank on each rank's host."""

    root: Path
    part: str
    rank: int
    hosts: Sequence[int]

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its host."""
        return self.hosts[self.rank] == self.rank


@dataclass(frozen=True)
class Save:
    """A save: `steps` optimizer steps are done, and it is the `serial`-th save.

    Of older ones the newest `keep` stay, and that of the step `best`.
    """

    step: int
    run: int
    serial: int
    meta: Mapping[str, Any]
    keep: int
    copies: int = 1
    best: int | None = None


def attempt(act: Callable[[], object], folder: Path) -> str | None:
    """Do what writes into a folder; why it was not possible, if it was not."""
    try:
        act()
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        place = error.filename or folder
        return f"{place}: {disk.why(error, Path(place))}"
    return None


class Transaction:
    """One save, of this rank's state."""

    def __init__(self, place: Place, save: Save, gather: Gather, peers: Peers | None) -> None:
        """`peers` are needed for second copies only."""
        self._place, self._save, self._gather, self._peers = place, save, gather, peers
        self._problems: list[str] = []

    def run(self, state: object) -> str | None:
        """Save; return why that was not possible, the same on every rank that saves this step.

        Raises:
            TypeError: `state` holds what no file can hold.
        """
        root, step, first = self._place.root, self._save.step, self._place.is_first
        part = Part(self._place.part, 0, "")
        while True:
            begun = self._gather([step, self._save.serial])
            latest, other = max((theirs, rank) for rank, (theirs, _) in enumerate(begun))
            if step < latest:
                return (
                    f"rank {other} saves step {latest} and not step {step}, as a rank was lost "
                    "in between"
                )
            if all(theirs == step for theirs, _ in begun):
                break
        self._save = replace(self._save, serial=max(serial for _, serial in begun))

        def write() -> None:
            nonlocal part
            part = files.write_part(files.partial_folder(root, step), self._place.part, state)

        parts: list[Part] = []
        if self._all(lambda: files.begin(root, step) if first else None) and self._all(write):
            parts = [Part(**fields) for fields in self._gather(asdict(part))]
        prepared = bool(parts) and self._copy(parts) and self._prepare(parts)
        if not prepared:
            if first:
                attempt(lambda: files.discard(root, step), root)
            self._gather("discarded")
        return "; ".join(self._problems) or None

    def _prepare(self, parts: Sequence[Part]) -> bool:
        """The second half; whether all machines have come to hold the step."""
        save, root, first = self._save, self._place.root, self._place.is_first
        listed = tuple(sorted(parts, key=lambda part: part.name))
        manifest = Manifest(save.step, save.run, save.serial, dict(save.meta), listed)
        if not self._all(lambda: files.prepare(root, manifest) if first else None):
            return False
        published = self._all(lambda: files.publish(root, manifest) if first else None)
        if published and first:
            problem = attempt(
                lambda: files.settle(root, save.step, keep=save.keep, best=save.best), root
            )
            if problem is not None:
                _log.warning("checkpoints: older steps stay: %s", problem)
        return True

    def _copy(self, parts: Sequence[Part]) -> bool:
        transfers = second_copies(parts, self._place.hosts, self._save.copies)
        if not transfers or self._peers is None:
            return True
        folder = files.partial_folder(self._place.root, self._save.step)
        found = run_transfers(self._peers, folder, transfers)
        return self._agree("; ".join(found) or None)

    def _all(self, act: Callable[[], object]) -> bool:
        return self._agree(attempt(act, self._place.root))

    def _agree(self, problem: str | None) -> bool:
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(self._gather(problem)) if text]
        self._problems += texts
        return not texts
