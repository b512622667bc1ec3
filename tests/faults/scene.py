"""A run that is disturbed: what faults need to know to strike at the right place and moment."""

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.machines import HOSTS, Machines
from thinpipe.launch.checkpoint import files

AIM_S = 60.0
"""How long to wait for the moment that a fault is for."""
SAMPLES, BATCH = 96, 8
STEPS_PER_EPOCH = SAMPLES // BATCH
EVAL_STEPS = 5 * STEPS_PER_EPOCH


class NoMomentError(Exception):
    """The moment that a fault is for did not come, mostly because the run ended."""


@dataclass
class Scene:
    """`total` is the last step of the run; `heals` undo what must not be broken at a new start."""

    machines: Machines
    chance: random.Random
    total: int
    heals: list[Callable[[], None]] = field(default_factory=list)

    def host(self) -> int:
        return self.chance.randrange(HOSTS)

    def wait(self, true: Callable[[], object]) -> None:
        """Wait for the right moment.

        Raises:
            NoMomentError: it does not come.
        """
        machines = self.machines
        if not machines.wait(lambda: true() or machines.has_ended(), AIM_S) or not true():
            raise NoMomentError

    def victim(self, kind: str, host: int) -> psutil.Process:
        """The process of this kind on a host; waited for, as it may just be starting."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found.extend(self.machines.on_host(kind, host))
            return bool(found)

        self.wait(look)
        return found[0]

    def power_cut(self) -> None:
        """Every process of every host is killed, and what is in RAM is gone."""
        for _, process in self.machines.processes():
            kill(process)
        self.machines.wait(self.machines.has_ended, AIM_S)
        for path in Path("/dev/shm").iterdir():  # of this namespace
            path.unlink()

    # Moments

    def any_time(self, _host: int) -> None:
        time.sleep(self.chance.random() * 0.4)

    def while_preparing(self, host: int) -> None:
        """The first phase of a save: its parts are written."""
        root = self.machines.checkpoints(host)
        self.wait(lambda: any(not (p / "manifest.json").exists() for p in _partial(root)))

    def while_publishing(self, host: int) -> None:
        """The second phase: the manifest is there, or the step has its name on this host."""
        root = self.machines.checkpoints(host)
        before = files.newest(root) or 0
        self.wait(
            lambda: (
                any((p / "manifest.json").exists() for p in _partial(root))
                or _newest_name(root) > before
            )
        )

    def while_evaluating(self, _host: int) -> None:
        """The last step before an evaluation is recorded after it."""
        self.wait(lambda: self.machines.steps() % EVAL_STEPS == EVAL_STEPS - 1)
        time.sleep(self.chance.random() * 0.1)

    def while_restarting(self, host: int) -> None:
        """Another rank was killed, and a new one of this host's is on its way."""
        before = self.victim("rank", host).pid
        self.machines.mark()
        self.victim("rank", (host + 1) % HOSTS).kill()
        self.wait(lambda: any(p.pid != before for p in self.machines.on_host("rank", host)))
        time.sleep(self.chance.random() ** 2)

    def at_the_first_step(self, host: int) -> None:
        """A restarted run has restored its state."""
        self.while_restarting(host)
        self.wait(lambda: "from step" in self.machines.said(0))

    def at_the_end(self, _host: int) -> None:
        """The last steps, the last save and the report."""
        self.wait(lambda: self.machines.steps() >= self.total - 1)
        time.sleep(self.chance.random() * 0.5)

    def while_starting(self, _host: int) -> None:
        """All machines went off at once, and are started again."""
        self.power_cut()
        self.machines.start_all()
        time.sleep(self.chance.random() * 8)


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _partial(root: Path) -> list[Path]:
    return [*root.glob(".step-*.partial")] if root.is_dir() else []


def _newest_name(root: Path) -> int:
    return max((int(p.name.removeprefix("step-")) for p in root.glob("step-*")), default=0)
