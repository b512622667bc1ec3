"""Saving and restoring a run's whole state, all ranks together, bit for bit."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thinpipe.aqsgd.memory import ROWS
from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.choice import ChosenCheckpoint
from thinpipe.launch.checkpoint.contents import collect, distribute, snapshot, without_rows
from thinpipe.launch.checkpoint.manifest import CheckpointError, Manifest, step_name
from thinpipe.launch.checkpoint.reshard import Layout, part_name, restore
from thinpipe.launch.checkpoint.resume import place_of
from thinpipe.launch.checkpoint.store_gather import StoreGather
from thinpipe.launch.checkpoint.transaction import Gather, Place, Save, Transaction
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.net.overlay.ranks import gone_for_good
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.session import Session
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.transport import Peers

_log = logging.getLogger(__name__)
_SLOWEST_DISK_S = 3600.0
"""How long ranks wait for each other's disks; a rank that is gone is noticed at once elsewhere."""
_SERIAL_BITS = 20  # of a save's number, those that count within a generation of ranks (`regroup`)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 640.0
"""Wait before a failed save is retried; each failure in a row doubles it."""


class Checkpoints:
    """Saves and restores the state of one run, all ranks together.

    A save begins with a copy of the state (`start`, after which training continues), written by
    a thread; `save` waits for it. What cannot be saved is a warning, and is tried again soon
    (`retry_due`).
    """

    def __init__(
        self,
        root: Path,
        config: RunConfig,
        built: Built,
        session: Session,
        facts: Mapping[str, Any],
    ) -> None:
        """`facts` (config and data digests), as JSON has them, must be equal on a resume."""
        self.end: int | None = None
        """The step that nothing can follow: it is saved without the activation cache,
        and replaces those before it unless the settings say how many to keep."""
        self._stall_s = 0.0
        self._root, self._options, self._data = root, config.checkpoint, config.data
        self._memories_on_disk = config.memory.tier == "disk"
        self._built, self._session = built, session
        self.facts = facts
        self._serial = 0
        self._last_step: int | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._board: StoreGather | None = None
        self._under_way: Future[bool] | None = None
        self._place: Place | None = None
        self._made_peers: Peers | None = None
        self._copied: Any = None
        self._pause_s = _FIRST_PAUSE_S
        self._retry_at_s: float | None = None
        self._problem: str | None = None
        self._gone: Callable[[], str] = gone_for_good
        self._goes_on = False
        self._generation = 0

    def locate(self, hosts: Sequence[int]) -> None:
        """The ranks there are now save on these hosts, each named by its first rank."""
        mesh = self._session.mesh
        self._place = Place(self._root, part_name(mesh), mesh.rank, tuple(hosts))

    def connect(self) -> None:
        """Make what second copies travel on; a collective, once for the ranks there are."""
        if self._needs_peers:
            self._peers()

    def watch(self, gone: Callable[[], str]) -> None:
        """`gone` says who will not answer any more; a save that breaks fails, and not the run."""
        self._gone, self._goes_on = gone, True

    def regroup(self, generation: int) -> None:
        """Ranks have left, or came. A save under way fails, and is tried again.

        `locate` and new `facts` come next, and `connect` when all meet.
        """
        self._gone = lambda: "ranks have left"
        if not self.wait():
            self._retry_at_s = time.monotonic()
        self._board, self._made_peers = None, None
        # the same on all ranks, and more than before, however many saves each has begun
        high = (self._serial >> _SERIAL_BITS) + generation - self._generation
        self._serial, self._generation = high << _SERIAL_BITS, generation

    @property
    def number(self) -> tuple[int, int, int | None]:
        """Of the last save: which it is, among which ranks, and its step; for those who join."""
        return self._serial, self._generation, self._last_step

    def follow(self, serial: int, generation: int, last_step: int | None) -> None:
        """Go on where others are."""
        self._serial, self._generation, self._last_step = serial, generation, last_step

    def start(self, step: int) -> None:
        """Save as `root/step-<step>` while training continues; `step` optimizer steps are done.

        Waits for the save before it, and for the copy of the state. Memories on disk are too large
        to copy: they are written before this returns.
        """
        began_s = time.perf_counter()
        self.wait()
        if self._goes_on and self._needs_peers and self._made_peers is None:
            self._failed("machines have not met since some left or came", step)
            return
        try:
            state = collect(self._built, memories=step != self.end)
        except TransportError as error:  # of an exchange under way
            if not self._goes_on:
                raise
            self._failed(str(error), step)
            return
        transaction = self._transaction(step, self._gather_in_background)
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        if not self._memories_on_disk:
            state = snapshot(state, self._copied)
            self._copied = without_rows(state)
        self._under_way = self._thread.submit(self._run, transaction, step, state, True)
        if self._memories_on_disk:
            self.wait()
        self._stall_s += time.perf_counter() - began_s

    def wait(self) -> bool:
        """Wait for the save that is under way; whether it succeeded."""
        if self._under_way is None:
            return True
        under_way, self._under_way = self._under_way, None
        try:
            return under_way.result()
        except TransportError as error:
            if not (gone := self._gone()) and not self._goes_on:
                raise
            return self._failed(f"{gone or 'a connection broke'} ({error})", None)

    def retry_due(self) -> bool:
        """Whether the last save failed, long enough ago to try again with the step there is now."""
        under_way = self._under_way is not None and not self._under_way.done()
        due_s = self._retry_at_s
        return not under_way and due_s is not None and time.monotonic() >= due_s

    def save(self, step: int, *, warns: bool = True) -> bool:
        """Save without a copy, while nothing trains; False if it failed, which it `warns` of."""
        saved = self._save(step)
        if warns and not saved and self._session.local_rank == 0:
            _log.warning("step %d was not saved: %s (%s)", step, self._problem, self._saved())
        return saved

    def _save(self, step: int) -> bool:
        if self.wait() and self._last_step == step:
            return True
        began_s = time.perf_counter()
        # after a loss another rank's thread may be about to save the same step
        gather = self._gather_in_background if self._generation else self._gather
        transaction = self._transaction(step, gather)
        state = collect(self._built, memories=step != self.end)
        saved = self._run(transaction, step, state, warns=False)
        self._stall_s += time.perf_counter() - began_s
        return saved

    def save_last(self, step: int) -> None:
        """Save the end of the run.

        Raises:
            CheckpointError: that was not possible.
        """
        if not self._save(step):
            resume = "" if self._last_step is None else " with --resume"
            raise CheckpointError(
                f"step {step}, the last one, could not be saved: {self._problem}; {self._saved()}; "
                f"then train again{resume}"
            )

    def held_up(self) -> str:
        return f"saving held training up for {self._stall_s:.2f} s"

    def resume(self, chosen: ChosenCheckpoint) -> int:
        """Restore what was chosen; return the steps done.

        Raises:
            CheckpointError: on every rank, if it is of another run.
        """
        manifest = chosen.manifest
        self._serial, self._last_step = chosen.last_serial, manifest.step
        with self._failing_together():
            self._check_facts(chosen.folder, manifest)
            self._load(chosen.folder, manifest)
        return manifest.step

    def _check_facts(self, folder: Path, manifest: Manifest) -> None:
        from thinpipe.launch.checkpoint.facts import check_facts  # compares settings

        check_facts(folder, manifest.meta, self.facts, self._data)

    def check_own(self) -> None:
        """Check that what this machine saved before is of this run; a collective."""
        with self._failing_together():
            if (newest := files.newest(self._root)) is not None:
                folder = self._root / step_name(newest)
                self._check_facts(folder, files.read_manifest(folder))

    def check_earlier(self, step: int, serial: int) -> None:
        """Check that the run was at a `step` and its `serial`-th save after all that is saved here.

        What these processes save themselves may be here too, where the folder is shared.

        Raises:
            CheckpointError: it went on from an earlier one, elsewhere.
        """
        others = [m for m in files.complete(self._root) if m.run != self._session.run_id]
        saved = max(others, key=lambda m: (m.serial, m.step), default=None)
        if saved is not None and (saved.step > step or saved.serial > serial):
            raise CheckpointError(
                f"{self._root / step_name(saved.step)}: the run, now at step {step}, has gone on "
                f"from an earlier checkpoint, without this machine; move {self._root} away, or "
                "use another run.folder here"
            )

    @property
    def _needs_peers(self) -> bool:
        return self._options.copies > 1 and len({*self._where.hosts}) > 1

    @property
    def _where(self) -> Place:
        self._place = self._place or place_of(self._session, self._root)
        return self._place

    def _transaction(self, step: int, gather: Gather) -> Transaction:
        self._serial += 1
        keep, copies = self._options.keep, self._options.copies
        peers = self._peers() if self._needs_peers else None
        if step == self.end and "keep" not in self._options.model_fields_set:
            keep = 1
        best = self._built.best.step
        save = Save(step, self._session.run_id, self._serial, self.facts, keep, copies, best)
        return Transaction(self._where, save, gather, peers)

    def _run(self, transaction: Transaction, step: int, state: Any, warns: bool) -> bool:
        """Remember what was saved, or warn at once if it `warns`; whether it was saved."""
        problem = transaction.run(state)
        if problem is None:
            self._problem = None
            self._last_step, self._retry_at_s, self._pause_s = step, None, _FIRST_PAUSE_S
            return True
        return self._failed(problem, step if warns else None)

    def _failed(self, problem: str, step: int | None) -> bool:
        self._problem = problem
        if self._session.local_rank == 0 and step is not None:
            later = f"saving is retried in {self._pause_s:.0f} s ({self._saved()})"
            text = "step %d was not saved: %s; training continues; %s"
            _log.warning(text, step, problem, later)
        self._retry_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return False

    def _saved(self) -> str:
        step = self._last_step
        return "nothing is saved yet" if step is None else f"step {step} is saved"

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(self._session.transport, value)

    def _gather_in_background(self, value: Any) -> list[Any]:
        if self._board is None:
            mesh, store = self._session.mesh, self._session.store
            self._board = StoreGather(
                store,
                mesh.rank,
                mesh.world_size,
                name=f"checkpoints{self._generation or ''}",
                limit_s=_SLOWEST_DISK_S,
                gone=lambda: self._gone(),
            )
        return self._board.gather(value)

    def _peers(self) -> Peers:
        self._made_peers = self._made_peers or self._session.transport.peers("world")
        return self._made_peers

    def _load(self, folder: Path, manifest: Manifest) -> None:
        saved, mine = (facts["config"]["pipeline"] for facts in (manifest.meta, self.facts))
        before, now = Layout.of(saved), Layout.of(mine)
        if before == now:  # the activation cache may be larger than RAM
            state = files.read_part(folder, self._where.part, mapped=ROWS, verify=False)
            distribute(self._built, state, folder)
        else:
            restore(self._built, folder, before, now, self._session.mesh)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raise one rank's problem on all of them, so that none waits for it."""
        problem = None
        try:
            yield
        except CheckpointError as error:
            problem = str(error)
        for text in filter(None, self._gather(problem)):
            raise CheckpointError(text)


def saved_so_far(run_folder: Path, resume: str) -> str:
    """How to continue a run that has stopped; `resume` is the option."""
    step = files.newest(run_folder / "checkpoints")
    if step is None:
        return "no checkpoint was saved yet"
    return f"everything up to step {step} is saved; continue from there with {resume}"
