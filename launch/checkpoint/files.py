"""Checkpoints: folders `<root>/step-<N>`, published atomically and verified when read.

    step-40/stage-0.replica-0.safetensors   one part: the state of one rank
    step-40/manifest.json                   size and sha256 of every part, and of itself
    latest                                  "step-40"
    .step-50.partial/                       being written; renamed when complete

`begin`, then every rank's `write_part`, then `finish`; nothing here talks to other processes. The
caller keeps the three apart with barriers and gathers the parts' digests. `begin` and `finish` run
once per host: several hosts may do both at once on one file system, or each on a disk of its own.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError

from thinpipe.launch.checkpoint.state_file import load_state, save_state

_FORMAT = 1
_MANIFEST = "manifest.json"
_REPLACED = "replaced"
# What a host gets if another publishes first: the folder is gone, or holds its own target.
_PUBLISHED_ELSEWHERE = (errno.ENOENT, errno.EINVAL)
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_HIDDEN = re.compile(r"\.step-(0|[1-9][0-9]*)\..+")
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CheckpointError(ValueError):
    """An unusable checkpoint: names the file, the problem, and the step to use instead."""


@dataclass(frozen=True)
class Part:
    """One rank's file, as the manifest records it; `Part(**asdict(part))` goes through JSON."""

    name: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not _PART_NAME.fullmatch(self.name):
            raise ValueError(
                f"part = {self.name!r}: the name becomes a file name; use letters, digits, '.', "
                "'_' and '-', and start with a letter or digit"
            )

    def path(self, folder: Path) -> Path:
        """The part's file in a checkpoint's folder."""
        return folder / f"{self.name}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """Description of a complete checkpoint; `meta` is the caller's, read back from JSON."""

    step: int
    meta: dict[str, Any]
    parts: tuple[Part, ...]


def begin(root: Path, step: int) -> Path:
    """Make the empty folder that the parts of `step` are written to, dropping a stale one.

    Every host's `begin` must be over before the first `write_part`: hosts that share a file system
    would take each other's folder for a stale one.
    """
    if step < 0:
        raise ValueError(f"step = {step}: steps count from 0")
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
        CheckpointError: the folder is missing, or the file cannot be written.
    """
    path = Part(part, 0, "").path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: missing; call begin before writing {part!r}")
    try:
        save_state(path, state)
    except SafetensorError as error:
        large = "header too large" in str(error)
        remedy = "keep long lists as tensors" if large else "free disk space"
        raise CheckpointError(f"{path}: not written: {error}; {remedy}") from error
    with path.open("r+b") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    return Part(part, path.stat().st_size, sha256)


def read_part(folder: Path, part: str, *, mapped: str | None = None) -> Any:
    """Verify one part against the manifest and rebuild its state (tensors on the CPU).

    Tensors under the key `mapped` stay in the file: copy them at once.

    Raises:
        CheckpointError: the manifest or the part is missing or damaged, or the part is unknown.
    """
    manifest = read_manifest(folder)
    listed = {known.name: known for known in manifest.parts}
    if part not in listed:
        raise CheckpointError(
            f"{folder / _MANIFEST}: has no part {part!r}, only {', '.join(listed) or 'none'}; "
            f"resume with the layout it was saved with; {_alternative(folder, part)}"
        )
    path = listed[part].path(folder)
    wrong = _size_error(listed[part], folder) or _digest_error(listed[part], folder)
    if wrong:
        raise CheckpointError(f"{path}: {wrong}; {_alternative(folder, part)}")
    return load_state(path, mapped=mapped)


def finish(root: Path, step: int, *, parts: Iterable[Part], meta: Mapping[str, Any]) -> Path:
    """Write the manifest, rename the folder of `begin`, and only then update `latest`.

    `parts` lists every part in the folder; parts that other hosts wrote to their own disks may be
    listed too. `meta` must survive JSON. A step saved before is replaced. Of several hosts that
    finish one step on one file system, the first publishes and the others verify.

    Raises:
        ValueError: `meta` does not fit JSON, or two parts have one name.
        CheckpointError: the files are not those of `parts`, or the folder is missing.
    """
    manifest = Manifest(step, _through_json(meta), tuple(sorted(parts, key=lambda p: p.name)))
    partial, final = partial_folder(root, step), root / _name(step)
    try:
        _check_listed(partial, manifest.parts)
        _publish(partial, final, manifest)
    except OSError as error:
        if error.errno not in _PUBLISHED_ELSEWHERE:
            raise
        if not (_is_complete(final) and _load_manifest(final).parts == manifest.parts):
            raise CheckpointError(
                f"{partial}: missing, and {final} does not hold the same parts; call begin and "
                "write_part first"
            ) from error
    _sync_folder(root)
    _write_file(root / "latest", _name(step) + "\n", scratch=_hidden(root, step, "latest"))
    _sync_folder(root)
    return final


def read_manifest(folder: Path) -> Manifest:
    """Read and verify a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing, damaged, or of a format this version does not support.
    """
    try:
        return _load_manifest(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_alternative(folder)}") from error


def saved_at(folder: Path) -> float:
    """When a checkpoint was finished, in seconds as file systems count them."""
    return (folder / _MANIFEST).stat().st_mtime


def steps(root: Path) -> list[int]:
    """The complete steps under `root`, ascending: manifest intact, no part of the wrong size.

    A part that is missing here may be on another host, so the step still counts as complete.
    """
    if not root.is_dir():
        return []
    named = [step for folder in root.iterdir() if (step := _step_of(folder.name)) is not None]
    return sorted(step for step in named if _is_complete(root / _name(step)))


def latest(root: Path) -> int | None:
    """The step that `latest` names, or None if no step was ever finished.

    Raises:
        CheckpointError: it names a folder that is missing or not complete.
    """
    pointer = root / "latest"
    try:
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    step = _step_of(name)
    if step is None or not _is_complete(root / name):
        raise CheckpointError(
            f"{pointer}: names {name!r}, which is missing or incomplete; {_alternative(pointer)}"
        )
    return step


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete steps and the one that `latest` names.

    Leftovers of unfinished saves go too where they are older than `latest`; a newer one may
    be in progress. Damaged steps are kept for inspection.

    Raises:
        ValueError: `keep` is below 1.
        CheckpointError: `latest` names no complete step, so none can be removed safely.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least one checkpoint must be kept; use 1 or more")
    named = latest(root)
    if named is None:
        return
    for step in steps(root)[:-keep]:
        if step != named:
            _discard(root / _name(step), step)
    for leftover in root.iterdir():
        match = _HIDDEN.fullmatch(leftover.name)
        if match and int(match[1]) < named:
            _remove(leftover)


def _publish(partial: Path, final: Path, manifest: Manifest) -> None:
    root = final.parent
    scratch = _hidden(root, manifest.step, "manifest")
    _write_file(partial / _MANIFEST, _render(manifest), scratch=scratch)
    _sync_folder(partial)
    # Moved into the folder that replaces it: once another host has published that one, this move
    # fails and cannot remove the new step. A crash between the two moves costs this
    # step, not the older ones.
    replaced = partial / _REPLACED
    try:
        _move_if_there(final, replaced)
        os.replace(partial, final)
    except OSError:
        if not final.exists():
            _move_if_there(replaced, final)
        raise
    _sync_folder(root)
    _remove(final / _REPLACED)


def _check_listed(folder: Path, parts: tuple[Part, ...]) -> None:
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"parts = {names}: duplicate names; give each rank its own")
    unlisted = {path.stem for path in folder.glob("*.safetensors")} - set(names)
    if unlisted:
        raise CheckpointError(
            f"{folder}: holds {', '.join(sorted(unlisted))}, which are not in parts; pass the "
            "result of every write_part"
        )
    for part in parts:
        wrong = _size_error(part, folder)
        if part.path(folder).exists() and wrong:
            raise CheckpointError(f"{part.path(folder)}: {wrong}; begin and write this step again")


def _through_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(meta), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta = {meta!r}: {error}; pass only JSON values") from error
    return plain


def _render(manifest: Manifest) -> str:
    body = {"format": _FORMAT, **asdict(manifest)}
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, indent=1) + "\n"


def _load_manifest(folder: Path) -> Manifest:
    path = folder / _MANIFEST
    try:
        text = path.read_bytes().decode("utf-8")
        raw = json.loads(text)
        if raw["format"] != _FORMAT:
            raise ValueError(f"format {raw['format']} is not the one read here, {_FORMAT}")
        parts = tuple(Part(**part) for part in raw["parts"])
        manifest = Manifest(raw["step"], raw["meta"], parts)
        # Compared byte for byte, so that any damage is found, even in white space.
        if text != _render(manifest):
            raise ValueError("its digest differs")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
    return manifest


def _size_error(part: Part, folder: Path) -> str | None:
    try:
        nbytes = part.path(folder).stat().st_size
    except FileNotFoundError:
        return "missing"
    if nbytes < part.nbytes:
        return f"truncated: {nbytes} of {part.nbytes} bytes"
    return f"too long: {nbytes} bytes, not {part.nbytes}" if nbytes > part.nbytes else None


def _digest_error(part: Part, folder: Path) -> str | None:
    with part.path(folder).open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return None if sha256 == part.sha256 else f"sha256 is {sha256}, the manifest has {part.sha256}"


def _is_complete(folder: Path) -> bool:
    try:
        parts = _load_manifest(folder).parts
    except CheckpointError:
        return False
    return all(_size_error(part, folder) in (None, "missing") for part in parts)


def _alternative(folder: Path, part: str | None = None) -> str:
    """The end of an error about `folder`: an older step to use, with `part` intact if given."""
    root, step = folder.parent, _step_of(folder.name)
    for older in reversed(steps(root)):
        good = root / _name(older)
        if step is not None and older >= step:
            continue
        listed = [known for known in _load_manifest(good).parts if known.name == part]
        if part is None or (listed and not _size_error(listed[0], good)):
            return (
                f"{_name(older)} is complete: train --resume --step {older}, export --step {older}"
            )
    found = ", ".join(str(other) for other in steps(root) if other != step)
    return f"{root} holds no older complete step" + (f", but {found}" if found else "")


def _name(step: int) -> str:
    return f"step-{step}"


def _step_of(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def partial_folder(root: Path, step: int) -> Path:
    """Where `begin` makes the folder of an unfinished step."""
    return root / f".{_name(step)}.partial"


def _hidden(root: Path, step: int, what: str) -> Path:
    return root / f".{_name(step)}.{what}-{uuid4().hex}"


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
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
