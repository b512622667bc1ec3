"""Checkpoints on one disk: folders `<root>/step-<N>`, published atomically, verified when read.

    step-40/replica-0.rank-0.safetensors   one part: the state of one rank
    step-40/manifest.json                  run, size and sha256 of every part, and of itself
    latest                                 "step-40", for people: nothing depends on it
    best                                   "step-20", if evaluations choose one
    .step-50.partial/                      being written; renamed when all machines hold theirs

`begin`, then every rank's `write_part`, then `prepare` on every machine, then `publish`, then
`settle`; nothing here talks to other processes. The caller (`transaction.py`) keeps the phases
apart and gathers the parts' digests. All but `write_part` run once per host: several hosts may do
so at once on one file system, or each on a disk of its own.

A crash before all machines have prepared costs the new step. After that, every machine has it on
disk, published or not, and restoring completes it.
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from thinpipe.launch.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    Part,
    load_manifest,
    part_error,
    size_error,
    step_name,
    step_of,
)
from thinpipe.launch.checkpoint.state_file import load_state, save_state
from thinpipe.launch.host import disk

BEST = "best"
_REPLACED = "replaced"
# What a host gets if another publishes first: the folder is gone, or holds its own target.
_PUBLISHED_ELSEWHERE = (errno.ENOENT, errno.EINVAL)
_HIDDEN = re.compile(r"\.step-(0|[1-9][0-9]*)\..+")
_PARTIAL = re.compile(r"\.step-(0|[1-9][0-9]*)\.partial")


@dataclass(frozen=True)
class Offer:
    """A checkpoint that this host has its share of, published or only prepared."""

    step: int
    serial: int
    run: int
    digest: str
    prepared: bool

    def folder(self, root: Path) -> Path:
        return partial_folder(root, self.step) if self.prepared else root / step_name(self.step)


def begin(root: Path, step: int) -> Path:
    """Make the empty folder that the parts of `step` are written to, dropping a stale one.

    Every host's `begin` must be over before the first `write_part`: hosts that share a file system
    would take each other's folder for a stale one.
    """
    partial = partial_folder(root, step)
    root.mkdir(parents=True, exist_ok=True)
    _discard(partial, step)
    with contextlib.suppress(FileExistsError):  # a host that removes it makes a new one
        partial.mkdir()
    return partial


def write_part(folder: Path, part: str, state: object) -> Part:
    """Write one rank's state into the folder that `begin` made, and flush it to disk.

    Raises:
        TypeError: `state` holds something that `state_file.py` cannot write.
        ValueError: `part` is no file name.
        CheckpointError: the file cannot be written.
    """
    path = Part(part, 0, "").path(folder)
    try:
        sha256 = save_state(path, state)
    except OSError as error:
        raise CheckpointError(f"{path}: not written: {disk.why(error, folder)}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; keep long lists as tensors") from error
    return Part(part, path.stat().st_size, sha256)


def read_part(folder: Path, part: str, *, mapped: str | None = None, verify: bool = True) -> Any:
    """Verify one part against the manifest and rebuild its state (tensors on the CPU).

    Tensors under the key `mapped` stay in the file: copy them at once. Without `verify` only the
    size is compared, for a part that was verified just now.

    Raises:
        CheckpointError: the manifest or the part is missing or damaged, or the part is unknown.
    """
    manifest = read_manifest(folder)
    listed = {known.name: known for known in manifest.parts}
    if part not in listed:
        raise CheckpointError(
            f"{folder / MANIFEST}: has no part {part!r}, only {', '.join(listed) or 'none'}; "
            f"resume with the layout it was saved with; {alternative(folder, part)}"
        )
    path = listed[part].path(folder)
    wrong = (part_error if verify else size_error)(listed[part], folder)
    if wrong:
        raise CheckpointError(f"{path}: {wrong}; {alternative(folder, part)}")
    return load_state(path, mapped=mapped)


def prepare(root: Path, manifest: Manifest) -> None:
    """Write the manifest next to the parts and flush both: the step survives a crash from here on.

    The manifest lists every part in the folder; those on other hosts' disks may be listed too.

    Raises:
        CheckpointError: the files are not those of the manifest.
        OSError: it cannot be written.
    """
    partial = partial_folder(root, manifest.step)
    _check_listed(partial, manifest)
    write_manifest(partial, manifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into a folder, and flush both."""
    scratch = _hidden(folder.parent, manifest.step, "manifest")
    _write_file(folder / MANIFEST, manifest.render(), scratch=scratch)
    disk.flush_folder(folder)


def publish(root: Path, manifest: Manifest) -> Path:
    """Give the prepared folder its name. A step saved before is replaced.

    Of several hosts that publish one step on one file system, the first does and the others verify.

    Raises:
        CheckpointError: neither the prepared folder nor the published one is there.
    """
    partial, final = partial_folder(root, manifest.step), root / step_name(manifest.step)
    # Moved into the folder that replaces it: once another host has published that one, this move
    # fails and cannot remove the new step. A crash between the two moves costs nothing: the
    # prepared step is completed when it is restored.
    replaced = partial / _REPLACED
    try:
        _move_if_there(final, replaced)
        os.replace(partial, final)
    except OSError as error:
        if not final.exists():
            _move_if_there(replaced, final)
        if error.errno not in _PUBLISHED_ELSEWHERE:
            raise
        published = _whole(final)
        if published is None or published.digest != manifest.digest:
            raise CheckpointError(
                f"{partial}: missing, and {final} does not hold the same parts; call begin, "
                "write_part and prepare first"
            ) from error
    disk.flush_folder(root)
    _remove(final / _REPLACED)
    return final


def discard(root: Path, step: int) -> None:
    """Drop what was written of a step that will not be published."""
    _discard(partial_folder(root, step), step)


def settle(root: Path, step: int, *, keep: int, best: int | None = None) -> None:
    """All hosts have published `step`: name it in `latest`, and remove what is older.

    The newest `keep` complete steps stay, those saved after it, and `best`, which a file of that
    name then names. Leftovers of unfinished saves go where they are older; a newer one may be in
    progress. Damaged steps are kept for inspection.
    """
    _write_file(root / "latest", step_name(step) + "\n", scratch=_hidden(root, step, "latest"))
    disk.flush_folder(root)
    published = sorted(complete(root), key=lambda manifest: manifest.serial)
    newest = next(m.serial for m in published if m.step == step)
    if any(manifest.step == best for manifest in published):
        assert best is not None, "a step of that number"
        _write_file(root / BEST, step_name(best) + "\n", scratch=_hidden(root, step, BEST))
    for manifest in [m for m in published if m.serial <= newest][:-keep]:
        if manifest.step != best:
            _discard(root / step_name(manifest.step), manifest.step)
    for leftover in root.iterdir():
        match = _HIDDEN.fullmatch(leftover.name)
        if match and int(match[1]) < step:
            _remove(leftover)


def read_manifest(folder: Path) -> Manifest:
    """Read and verify a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing, damaged, or of a format this version does not support.
    """
    try:
        return load_manifest(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {alternative(folder)}") from error


def complete(root: Path) -> Iterator[Manifest]:
    """Published steps under `root`: manifest intact, no part of the wrong size.

    A part that is missing here may be on another host, so the step still counts as complete.
    """
    for folder in _folders(root):
        if step_of(folder.name) is not None and (manifest := _whole(folder)):
            yield manifest


def steps(root: Path) -> list[int]:
    """The complete steps under `root`, ascending."""
    return sorted(manifest.step for manifest in complete(root))


def newest(root: Path) -> int | None:
    """The complete step that was saved last on this host, or None."""
    found = max(complete(root), key=lambda manifest: manifest.serial, default=None)
    return None if found is None else found.step


def best(root: Path) -> int | None:
    """The step of the best evaluation, or None; that checkpoint may be damaged."""
    file = root / BEST
    return step_of(file.read_text(encoding="utf-8").strip()) if file.is_file() else None


def offers(root: Path) -> list[Offer]:
    """All that this host could resume from, if the others can too."""
    found = []
    for folder in _folders(root):
        prepared = _PARTIAL.fullmatch(folder.name) is not None
        if not prepared and step_of(folder.name) is None:
            continue
        with contextlib.suppress(CheckpointError):  # those who ask are told by `broken`
            m = load_manifest(folder)
            found.append(Offer(m.step, m.serial, m.run, m.digest, prepared))
    return found


def broken(root: Path) -> dict[int, str]:
    """Problems of steps that have a folder but no readable manifest."""
    found = {}
    for folder in _folders(root):
        if (step := step_of(folder.name)) is not None:
            try:
                load_manifest(folder)
            except CheckpointError as error:
                found[step] = str(error)
    return found


def pointer(root: Path) -> str | None:
    """The content of `latest`, if it can be read."""
    try:
        return (root / "latest").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _whole(folder: Path) -> Manifest | None:
    """The manifest, if it is intact and no part has the wrong size."""
    # read once: a run that is training may remove the folder at any time
    with contextlib.suppress(CheckpointError):
        manifest = load_manifest(folder)
        if all(size_error(part, folder) in (None, "missing") for part in manifest.parts):
            return manifest
    return None


def alternative(folder: Path, part: str | None = None) -> str:
    """The end of an error about `folder`: an older step to use, with `part` intact if given."""
    root, step = folder.parent, step_of(folder.name)
    for older in reversed(steps(root)):
        name = step_name(older)
        if step is not None and older >= step:
            continue
        listed = [known for known in load_manifest(root / name).parts if known.name == part]
        if part is None or (listed and not size_error(listed[0], root / name)):
            return f"{name} is complete: train --resume --step {older}, export --step {older}"
    found = " or ".join(str(other) for other in steps(root) if other != step)
    remedy = f"use --step {found}, or leave it out for the newest" if found else "train again"
    return f"{root} holds no older complete step; {remedy}"


def partial_folder(root: Path, step: int) -> Path:
    """Where `begin` makes the folder of an unfinished step."""
    return root / f".{step_name(step)}.partial"


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []


def _check_listed(folder: Path, manifest: Manifest) -> None:
    unlisted = {path.stem for path in folder.glob("*.safetensors")} - {*manifest.names}
    if unlisted:
        raise CheckpointError(
            f"{folder}: holds {', '.join(sorted(unlisted))}, which are not in parts; pass the "
            "result of every write_part"
        )
    for part in manifest.parts:
        if (wrong := size_error(part, folder)) not in (None, "missing"):
            raise CheckpointError(f"{part.path(folder)}: {wrong}; begin and write this step again")


def _hidden(root: Path, step: int, what: str) -> Path:
    return root / f".{step_name(step)}.{what}-{uuid4().hex}"


def _move_if_there(source: Path, target: Path) -> bool:
    try:
        os.replace(source, target)
    except FileNotFoundError:
        return False
    return True


def _discard(folder: Path, step: int) -> None:
    # Renamed first: a crash during removal must not leave half a checkpoint under its name.
    aside = _hidden(folder.parent, step, "removed")
    if _move_if_there(folder, aside):
        _remove(aside)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    except FileNotFoundError:
        return  # another host is removing the same leftover


def _write_file(path: Path, text: str, *, scratch: Path) -> None:
    """Write `path` atomically; `scratch` is a unique temporary name on the same file system."""
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            disk.flush(file.fileno())
        disk.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
