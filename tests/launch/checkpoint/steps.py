"""Checkpoints of two stages, saved by one host."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.checkpoint.files import begin, write_part
from thinpipe.launch.checkpoint.manifest import Manifest, Part


def finish(
    root: Path, step: int, *, parts: Iterable[Part], meta: Any = None, serial: int = 0
) -> Path:
    """What one host does when all ranks have written: both phases, and what follows them."""
    listed = tuple(sorted(parts, key=lambda part: part.name))
    manifest = Manifest(step, 7, serial or step, meta or {}, listed)
    checkpoint.prepare(root, manifest)
    folder = checkpoint.publish(root, manifest)
    checkpoint.settle(root, step, keep=9)
    return folder


STAGES = ("stage-0.replica-0", "stage-1.replica-0")


def save(
    root: Path, step: int, *, seed: int = 0, meta: dict[str, Any] | None = None, serial: int = 0
) -> Path:
    folder = begin(root, step)
    generator = torch.Generator().manual_seed(1000 * seed + step)
    states = {name: {"w": torch.randn(64, generator=generator), "step": step} for name in STAGES}
    parts = [write_part(folder, name, state) for name, state in states.items()]
    return finish(root, step, parts=parts, meta=meta or {"config": "abc"}, serial=serial)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)
