"""Which checkpoint to resume from: the newest that is whole over all machines.

Machines compare the digests of their manifests, so parts of different saves are never joined. What
is damaged or missing on one machine is fetched from another that holds it; where none does, the
step before is tried, and the reason is kept for the user.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinpipe.launch.checkpoint import files
from thinpipe.launch.checkpoint.copies import Transfer, run_transfers
from thinpipe.launch.checkpoint.files import Offer
from thinpipe.launch.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    Part,
    part_error,
    size_error,
    step_name,
)
from thinpipe.launch.checkpoint.transaction import Gather, Place, attempt
from thinpipe.pipeline.comm.transport import Peers


class Candidate(NamedTuple):
    """A save, and the ranks whose hosts have a manifest of it."""

    step: int
    serial: int
    run: int
    digest: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint that every rank has what it needs of, and why newer ones are not used.

    `repaired` are its parts that were damaged or missing, and now come from another machine.
    """

    folder: Path
    manifest: Manifest
    rejected: tuple[str, ...]
    last_serial: int
    repaired: tuple[str, ...] = ()


def candidates(offers: Sequence[Sequence[Offer]], step: int | None) -> list[Candidate]:
    """All saves that any rank's host offers, the last one first; only those of `step` if given."""
    held: dict[tuple[int, int, int, str], list[int]] = {}
    for rank, own in enumerate(offers):
        for offer in own:
            if step is None or offer.step == step:
                key = (offer.step, offer.serial, offer.run, offer.digest)
                held.setdefault(key, []).append(rank)
    found = [Candidate(*key, tuple(dict.fromkeys(ranks))) for key, ranks in held.items()]
    return sorted(found, key=lambda c: (c.serial, len(c.holders), c.digest), reverse=True)


def conflict(candidate: Candidate, offers: Sequence[Sequence[Offer]]) -> str | None:
    """Whether another rank has the step of another save instead, in words."""
    for rank, own in enumerate(offers):
        for other in own:
            if rank in candidate.holders or other.step != candidate.step:
                continue
            if other.run != candidate.run:
                what = f"of run {candidate.run:016x}, rank {rank} of run {other.run:016x}"
            else:
                what = f"of save {candidate.serial}, rank {rank} of save {other.serial}"
            return f"parts of different saves: rank {candidate.holders[0]} has those {what}"
    return None


class CheckpointChoice:
    """The choice of one rank among all; every method is a collective."""

    def __init__(self, place: Place, gather: Gather, peers: Callable[[], Peers]) -> None:
        """`peers` makes links between all ranks, when they are needed."""
        self._place, self._gather, self._make_peers = place, gather, peers
        self._repaired: tuple[str, ...] = ()

    def newest(
        self, step: int | None, needed: Callable[[Manifest, Collection[str]], Sequence[str]]
    ) -> ChosenCheckpoint:
        """The newest whole step, or `step`.

        `needed` are the parts that this rank will read, of a step of which some are anywhere.

        Raises:
            CheckpointError: on every rank, if there is none.
        """
        root = self._place.root
        own = [asdict(offer) for offer in files.offers(root)]
        damaged = {str(number): text for number, text in files.broken(root).items()}
        answers = self._gather([own, damaged])
        offers = [[Offer(**fields) for fields in found] for found, _ in answers]
        serials = [offer.serial for found in offers for offer in found]
        rejected: list[str] = []
        for candidate in candidates(offers, step):
            problem = conflict(candidate, offers) or self._complete(candidate, needed)
            if isinstance(problem, Manifest):
                reasons = self._reasons(rejected, candidate, [broken for _, broken in answers])
                folder = root / step_name(candidate.step)
                return ChosenCheckpoint(folder, problem, reasons, max(serials), self._repaired)
            rejected.append(f"{step_name(candidate.step)} cannot be used: {problem}")
        raise CheckpointError(self._none(step, rejected, [broken for _, broken in answers]))

    def _none(
        self, step: int | None, rejected: Sequence[str], broken: Sequence[Mapping[str, str]]
    ) -> str:
        wrong = [*rejected, *_first_words(broken, lambda number: step in (None, number))]
        root = self._place.root
        if step is not None:
            what = "; ".join(wrong) or f"{root / step_name(step)}: missing"
            return f"{what}; {files.alternative(root / step_name(step))}"
        if not wrong:
            return f"{root}: no checkpoint to resume from"
        return f"{root}: no step is whole: {'; '.join(wrong)}; train without --resume to start over"

    def _reasons(
        self, rejected: Sequence[str], used: Candidate, broken: Sequence[Mapping[str, str]]
    ) -> tuple[str, ...]:
        """Why newer steps were passed over; a lost `latest` is one of them."""
        found = [*rejected, *_first_words(broken, lambda number: number > used.step)]
        named = files.pointer(self._place.root)
        texts = self._gather(f"{self._place.root / 'latest'} is missing" if named is None else None)
        lost = [text for text in texts if text]
        return (*found, *lost[:1])

    def _complete(
        self, candidate: Candidate, needed: Callable[[Manifest, Collection[str]], Sequence[str]]
    ) -> Manifest | str:
        """Have this step whole on all hosts and published; its manifest, or what is wrong."""
        root, mine = self._place.root, None
        for offer in files.offers(root):
            if offer.digest == candidate.digest and (mine is None or mine.prepared):
                mine = offer
        folder = _unnamed(root, candidate.step) if mine is None else mine.folder(root)
        manifest = self._manifest(candidate, folder)
        present = [p.name for p in manifest.parts if size_error(p, folder) is None]
        anywhere = {name for own in self._gather(present) for name in own}
        lacking = self._lacking(manifest, folder, needed(manifest, anywhere))
        answers = self._gather([lacking, present])
        found = self._plan(manifest, answers)
        if isinstance(found, str):
            return found
        self._repaired = tuple(
            f"rank {rank}: {text}"
            for rank, (wrong, _) in enumerate(answers)
            for text in wrong.values()
        )
        problem = self._fetch(manifest, folder, found, held=mine is not None)
        return manifest if problem is None else problem

    def _manifest(self, candidate: Candidate, folder: Path) -> Manifest:
        """Everyone has it from the first that holds it."""
        mine = None
        if self._place.rank == candidate.holders[0]:
            mine = asdict(files.read_manifest(folder))
        sent: Any = self._gather(mine)[candidate.holders[0]]
        sent["parts"] = tuple(Part(**part) for part in sent["parts"])
        return Manifest(**sent)

    def _lacking(self, manifest: Manifest, folder: Path, names: Sequence[str]) -> dict[str, str]:
        parts = {part.name: part for part in manifest.parts}
        found = {}
        for name in names:
            if name not in parts:
                found[name] = f"{folder}: has no part {name!r}, only {', '.join(parts)}"
            elif (wrong := part_error(parts[name], folder)) is not None:
                found[name] = f"{parts[name].path(folder)}: {wrong}"
        return found

    def _plan(self, manifest: Manifest, answers: Sequence[Any]) -> list[Transfer] | str:
        """Who sends what to whom, or what nobody has."""
        hosts, parts = self._place.hosts, {part.name: part for part in manifest.parts}
        lost = {(hosts[r], name) for r, (lacking, _) in enumerate(answers) for name in lacking}
        wanted: dict[tuple[int, str], Transfer] = {}
        for rank, (lacking, _) in enumerate(answers):
            for name, text in lacking.items():
                donors = [
                    other
                    for other, (_, present) in enumerate(answers)
                    if name in present and (hosts[other], name) not in lost
                ]
                if not donors:
                    return f"rank {rank}: {text}"
                transfer = Transfer(parts[name], donors[0], hosts[rank])
                wanted.setdefault((hosts[rank], name), transfer)
        return list(wanted.values())

    def _fetch(
        self, manifest: Manifest, folder: Path, transfers: Sequence[Transfer], *, held: bool
    ) -> str | None:
        root, problem = self._place.root, None
        comes_here = any(transfer.target == self._place.rank for transfer in transfers)
        if comes_here and not folder.is_dir():
            folder = files.begin(root, manifest.step)
        if transfers:
            problem = "; ".join(run_transfers(self._make_peers(), folder, transfers)) or None
        problem = self._first_of(problem)
        if problem is not None:
            return problem
        if self._place.is_first:
            problem = attempt(lambda: _publish(root, folder, manifest, held=held), folder)
        return self._first_of(problem)

    def _first_of(self, problem: str | None) -> str | None:
        texts = enumerate(self._gather(problem))
        return next((f"rank {rank}: {text}" for rank, text in texts if text), None)


def _unnamed(root: Path, step: int) -> Path:
    """Where parts of a step without a manifest may be: a kill can come between the two."""
    named, partial = root / step_name(step), files.partial_folder(root, step)
    return partial if partial.is_dir() and not named.exists() else named


def _publish(root: Path, folder: Path, manifest: Manifest, *, held: bool) -> None:
    if not held:
        files.write_manifest(folder, manifest)
    if folder != root / step_name(manifest.step):
        files.publish(root, manifest)


def _first_words(broken: Sequence[Mapping[str, str]], concerns: Callable[[int], bool]) -> list[str]:
    texts: dict[str, str] = {}
    for rank, own in enumerate(broken):
        for number, text in own.items():
            if concerns(int(number)):
                texts.setdefault(number, f"{step_name(int(number))}: rank {rank}: {text}")
    return list(texts.values())
