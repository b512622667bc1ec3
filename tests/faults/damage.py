"""Faults of disks and checkpoints in a run that is under way."""

import random
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil

from tests.faults.machines import HOSTS
from tests.faults.scene import Scene, kill
from thinpipe.launch.checkpoint import files

Harm = Callable[[Path, random.Random], object]
"""Does something to a host's checkpoints."""


def fill(scene: Scene) -> None:
    """A host's disk is full until a save has failed."""
    scene.any_time(0)
    _fill(scene, scene.host()).unlink()


def fill_and_kill(scene: Scene) -> None:
    """A rank dies while the disk is full; there is room again soon after."""
    host, victim = scene.host(), scene.victim("rank", scene.host())
    filler = _fill(scene, host)
    kill(victim)
    time.sleep(scene.chance.random() * 2)
    filler.unlink()


def harm_and_kill(harm: Harm, scene: Scene) -> None:
    """A host's newest checkpoint is damaged, then a rank is killed."""
    host = scene.host()
    scene.wait(lambda: len(files.steps(scene.machines.checkpoints(host))) > 1)
    _harm(scene, host, scene.victim("rank", scene.host()), harm)


def harm_all(scene: Scene) -> None:
    """No step of a host is whole any more."""
    machines = scene.machines
    scene.wait(lambda: all(files.steps(machines.checkpoints(host)) for host in range(HOSTS)))
    host = scene.host()
    _harm(scene, host, scene.victim("rank", host), _flip_all)


def _harm(scene: Scene, host: int, victim: psutil.Process, harm: Harm) -> None:
    victim.suspend()
    time.sleep(0.3)  # a save under way ends, or waits for the victim
    _keep(scene, host)
    scene.machines.mark()
    harm(scene.machines.checkpoints(host), scene.chance)
    kill(victim)


def _keep(scene: Scene, host: int) -> None:
    """If the run ends, the host gets its checkpoints back."""
    root, kept = scene.machines.checkpoints(host), scene.machines.folder / "kept"
    _copy(root, kept)
    scene.heals.append(partial(_copy, kept, root))


def _copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def _fill(scene: Scene, host: int) -> Path:
    """Fill a disk, and wait until a save has failed."""
    scene.machines.mark()
    filler = scene.machines.disk(host) / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    scene.wait(lambda: "was not saved" in scene.machines.said())
    return filler


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _flip_all(root: Path, chance: random.Random) -> None:
    for part in root.glob("*/*.safetensors"):
        _flip(part, chance)


def _newest(root: Path) -> Path:
    return root / f"step-{files.steps(root)[-1]}"


def _part(root: Path) -> Path:
    return next(iter(_newest(root).glob("*.safetensors")))


def _truncate(root: Path, chance: random.Random) -> None:
    path = _part(root)
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def _older_part(root: Path, _: random.Random) -> None:
    older = root / f"step-{files.steps(root)[0]}"
    shutil.copy(next(iter(older.glob("*.safetensors"))), _part(root))


def _older_step(root: Path, _: random.Random) -> None:
    _copy(root / f"step-{files.steps(root)[0]}", _newest(root))


HARMS: dict[str, Harm] = {
    "bit of a part": lambda root, chance: _flip(_part(root), chance),
    "bit of the manifest": lambda root, chance: _flip(_newest(root) / "manifest.json", chance),
    "part cut off": _truncate,
    "part missing": lambda root, _: _part(root).unlink(),
    "manifest missing": lambda root, _: (_newest(root) / "manifest.json").unlink(),
    "newest step missing": lambda root, _: shutil.rmtree(_newest(root)),
    "older part in place of a newer": _older_part,
    "older step under a newer name": _older_step,
    "all steps missing on one host": lambda root, _: shutil.rmtree(root),
    "latest missing": lambda root, _: (root / "latest").unlink(missing_ok=True),
    "latest wrong": lambda root, _: (root / "latest").write_text("step-99999\n"),
}
