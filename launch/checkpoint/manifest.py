"""The manifest of a checkpoint: whose it is, and the size and SHA-256 of every part, and of itself.

Two machines hold the same checkpoint if, and only if, their manifests have the same digest.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from thinpipe.launch.host import disk

MANIFEST = "manifest.json"
_FORMAT = 2  # 1 was before saves became one transaction of all machines
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
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
        return folder / f"{self.name}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """Description of a complete checkpoint; `meta` is the caller's, read back from JSON.

    `run` is the id of the process group that saved it, `serial` counts the saves of a run folder:
    after a resume from an older step, a lower step may be the newer one.
    """

    step: int
    run: int
    serial: int
    meta: dict[str, Any]
    parts: tuple[Part, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that is in it, and thereby of all parts."""
        return hashlib.sha256(json.dumps(self._body()).encode()).hexdigest()

    @property
    def names(self) -> list[str]:
        """Of all parts."""
        return [part.name for part in self.parts]

    def _body(self) -> dict[str, Any]:
        return {"format": _FORMAT, **asdict(self)}

    def render(self) -> str:
        return json.dumps({**self._body(), "sha256": self.digest}, indent=1) + "\n"


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a folder of this name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def load_manifest(folder: Path) -> Manifest:
    """Read and verify a manifest, and that it is the folder's own.

    Raises:
        CheckpointError: it is missing, damaged, or of a format this version does not support.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes().decode("utf-8")
        raw = json.loads(text)
        if raw["format"] != _FORMAT:
            raise ValueError(f"format {raw['format']} is not the one read here, {_FORMAT}")
        parts = tuple(Part(**part) for part in raw["parts"])
        manifest = Manifest(raw["step"], raw["run"], raw["serial"], raw["meta"], parts)
        # Compared byte for byte, so that any damage is found, even in white space.
        if text != manifest.render():
            raise ValueError("its digest differs")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    named = step_of(folder.name)
    if named is not None and named != manifest.step:
        raise CheckpointError(f"{path}: is that of step {manifest.step}; the folder was renamed")
    return manifest


def size_error(part: Part, folder: Path) -> str | None:
    """The problem with the size of a part's file, if there is one."""
    try:
        nbytes = part.path(folder).stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    if nbytes < part.nbytes:
        return f"truncated: {nbytes} of {part.nbytes} bytes"
    return f"too long: {nbytes} bytes, not {part.nbytes}" if nbytes > part.nbytes else None


def part_error(part: Part, folder: Path) -> str | None:
    """The problem with a part's file, if there is one; reads all of it."""
    wrong = size_error(part, folder)
    if wrong is not None:
        return wrong
    try:
        sha256 = file_digest(part.path(folder))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if sha256 == part.sha256 else f"sha256 is {sha256}, the manifest has {part.sha256}"


def file_digest(path: Path, *, flush: bool = False) -> str:
    """SHA-256 of a file; with `flush` it is on disk afterwards."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            disk.flush(file.fileno())
    return sha256
