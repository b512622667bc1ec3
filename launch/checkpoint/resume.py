"""Whether a run resumes from a checkpoint, and from which: all ranks together, before building."""

import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.choice import CheckpointChoice, ChosenCheckpoint
from thinpipe.launch.checkpoint.manifest import CheckpointError, Manifest
from thinpipe.launch.checkpoint.reshard import Layout, part_name, whole_replicas
from thinpipe.launch.checkpoint.transaction import Place
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.network import ROUND, first_here
from thinpipe.launch.net.ranks.session import Session

_log = logging.getLogger(__name__)


class Resume(NamedTuple):
    """Whether to resume from a checkpoint, and from which step if not the newest.

    If not `required`, a run without a checkpoint starts from scratch.
    """

    wanted: bool
    step: int | None = None
    required: bool = True
    chosen: ChosenCheckpoint | None = None

    @property
    def epochs(self) -> int:
        if self.chosen is None:
            return 0
        step, meta = self.chosen.manifest.step, self.chosen.manifest.meta
        epochs, first = meta.get("whole_epochs", (0, 0))  # where replicas changed in one
        return int(epochs) + max(-1, (step - int(first)) // int(meta["steps_per_epoch"]))

    @property
    def cuts(self) -> list[int] | None:
        if self.chosen is None:
            return None
        cuts: list[int] = self.chosen.manifest.meta["config"]["pipeline"]["cuts"]
        return cuts


def after_restart(resume: Resume) -> Resume:
    """The request, or an optional resume if ranks were restarted after a failure.

    torchrun's own count leaves out restarts for a machine that came back.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    again = restarts > 0 or int(os.environ.get(ROUND, "1")) > 1
    return Resume(True, required=False) if again and not resume.wanted else resume


def common_resume(session: Session, root: Path, resume: Resume, layout: Layout | None) -> Resume:
    """The common decision, with the checkpoint that it means.

    Agents count restarts differently, so one request is enough. A step's folder that cannot be
    used counts as one: a run does not silently start over next to it. One that no machine had
    published yet, and that is not whole, does not: restarted ranks start over. `layout` is that of
    this run; None: that of the checkpoint.

    Raises:
        CheckpointError: on every rank, if there is no whole checkpoint.
    """
    offers = files.offers(root)
    published = bool(files.broken(root)) or not all(offer.prepared for offer in offers)
    answers = gather_json(session.transport, [*resume[:3], bool(offers), published])
    requests = [Resume(*request) for *request, _, _ in answers if request[0]]
    needed = any(request.required for request in requests) or any(known for *_, known in answers)
    if not requests or not (needed or any(offered for *_, offered, _ in answers)):
        return Resume(False)
    step = next((r.step for r in requests if r.step is not None), None)
    try:
        chosen = choose(session, root, step, layout)
    except CheckpointError:
        if needed:
            raise
        return Resume(False)
    required = any(request.required for request in requests)
    return Resume(True, chosen.manifest.step, required, chosen)


def choose(
    session: Session, root: Path, step: int | None, layout: Layout | None
) -> ChosenCheckpoint:
    """`step`, or the newest that is whole for this layout on all machines."""
    place = place_of(session, root)

    def needed(manifest: Manifest, anywhere: Collection[str]) -> Sequence[str]:
        """Under another layout, all parts; with other replicas, of those that are whole."""
        saved, names = Layout.of(manifest.meta["config"]["pipeline"]), manifest.names
        if layout is None or layout == saved:
            return [place.part]
        if layout.replicas != saved.replicas:
            return whole_replicas(names, anywhere) or names
        return names

    choice = CheckpointChoice(
        place,
        lambda value: gather_json(session.transport, value),
        lambda: session.transport.peers("world"),
    )
    chosen = choice.newest(step, needed)
    if chosen.rejected and session.mesh.rank == 0:
        _log.warning(
            "warning: %s; resuming from step-%d, the newest whole one",
            "; ".join(chosen.rejected),
            chosen.manifest.step,
        )
    saved = Layout.of(chosen.manifest.meta["config"]["pipeline"])
    same = layout is None or layout == saved  # others need parts that their machines never had
    if chosen.repaired and same and session.mesh.rank == 0:
        _log.warning(
            "warning: step-%d was repaired from second copies: %s",
            chosen.manifest.step,
            "; ".join(chosen.repaired),
        )
    return chosen


def place_of(session: Session, root: Path) -> Place:
    """Where this rank saves; a collective."""
    mesh = session.mesh
    hosts = gather_json(session.transport, first_here(mesh.rank, session.local_rank))
    return Place(root, part_name(mesh), mesh.rank, tuple(hosts))
