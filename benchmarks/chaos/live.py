"""Faults in whole runs on emulated hosts, one after another: each run is restarted again and again.

Every run must end with the losses, and the digests of the last checkpoint's parts, of the run that
nothing disturbed, and leave nothing behind.
"""

import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos import faults
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.judge import LIMIT_S, Judge
from benchmarks.chaos.machines import HOSTS, PORT, Machines, isolate
from benchmarks.chaos.outcome import Outcome
from benchmarks.chaos.scene import NoMomentError, Scene
from benchmarks.chaos.wire import PORT as WIRE_PORT
from benchmarks.chaos.wire import FaultyWire
from benchmarks.chaos.workload import LAYOUTS, Calm, Workload

END = "end of a run"
"""What is judged when a run has ended counts as no fault."""
_EPOCHS, _SAVE_EVERY = 15, 2
_BITS_PER_RUN = 6


def inject(folder: Path, count: int, seed: int, *, only: str = "") -> Iterator[Outcome]:
    """Disturb runs `count` times, in both layouts by turns; a tenth are bits of memories in RAM.

    With `only`, by faults that have this in their name.

    Raises:
        ShapedError: hosts cannot be emulated here.
    """
    isolate()
    workloads = [Workload(folder, layout, _EPOCHS, _SAVE_EVERY) for layout in LAYOUTS]
    calm = [workload.calm() for workload in workloads]
    chance = random.Random(seed)
    bits = [faults.bits()] * _bit_count(count, only)
    others = _plan(chance, count - len(bits), only) if len(bits) < count else []
    number = 0
    while others or bits:
        which = number % len(workloads)
        queue = bits if not others or (bits and number % 3 == 2) else others
        most = _BITS_PER_RUN if queue is bits else len(queue)
        episode = Episode(folder / f"run{number}", workloads[which], calm[which])
        taken = episode.disturb(queue[:most], chance)
        del queue[: max(1, taken)]
        yield from episode.outcomes
        number += 1


def _bit_count(count: int, only: str) -> int:
    if only not in faults.bits().kind:
        return 0
    return count // 10 if any(only in fault.kind for fault in faults.catalogue()) else count


def _plan(chance: random.Random, count: int, only: str) -> list[Fault]:
    """All faults in random order, as often as needed.

    Raises:
        ValueError: there is none of the name.
    """
    kinds = [fault for fault in faults.catalogue() if only in fault.kind]
    if not kinds:
        names = "; ".join(fault.kind for fault in faults.catalogue())
        raise ValueError(f"--only {only!r}: no such fault; there are {names}")
    found: list[Fault] = []
    while len(found) < count:
        found += chance.sample(kinds, len(kinds))
    return found[:count]


class Episode:
    """One run from its start to its end, and the faults in it."""

    def __init__(self, folder: Path, workload: Workload, calm: Calm) -> None:
        self.outcomes: list[Outcome] = []
        self._workload, self._calm = workload, calm
        self.machines = Machines(folder, workload.config, *workload.settings)
        near = f"127.0.0.1:{WIRE_PORT}"
        self.machines.known_ports.add(near)
        self.machines.own[1] = [f'network.peers={{host0="{near}"}}']
        self._wire = FaultyWire(self.machines.net, 1, ("10.77.0.1", PORT), folder)

    def disturb(self, queue: Sequence[Fault], chance: random.Random) -> int:
        """Let faults strike until the run ends; how many of the queue did."""
        machines, exact = self.machines, all(fault.exact for fault in queue)
        scene = self.scene(chance)
        try:
            self.start()
            taken = 0
            for taken, fault in enumerate(queue, start=1):  # noqa: B007  # used after the loop
                if not self.strike(scene, fault):
                    break
            if exact and not machines.has_ended():
                self.strike(scene, chance.choice(faults.at_the_end()))
            machines.wait(machines.has_ended, LIMIT_S)
            self.judge_end(exact=exact)
            return taken
        finally:
            machines.close()

    def scene(self, chance: random.Random) -> Scene:
        """Where faults strike."""
        return Scene(self.machines, chance, self._workload.steps, self._wire)

    def start(self) -> None:
        """Start all machines, and wait for the first steps."""
        machines = self.machines
        machines.start_all()
        machines.wait(lambda: machines.steps() > 3 or machines.has_ended(), LIMIT_S)

    def strike(self, scene: Scene, fault: Fault) -> bool:
        """Whether the run goes on."""
        try:
            fault.strike(scene)
            self._add(Judge(scene, fault, self._calm.losses).outcome())
        except NoMomentError:
            pass
        except Exception:  # a mistake of this benchmark: shown as such, and the others go on
            self._add(Outcome(fault.kind, "lost", traceback.format_exc()))
        return not self.machines.has_ended()

    def judge_end(self, *, exact: bool) -> None:
        """What is wrong at the end is the matter of all faults of the run."""
        machines, problems = self.machines, []
        losses = [record["loss"] for record in machines.records()]
        if any(machines.codes.values()) or len(losses) != self._workload.steps:
            problems.append(f"ended with {machines.codes} after {len(losses)} steps")
        elif exact and losses != list(self._calm.losses):
            problems.append("losses differ")
        elif exact and any(machines.digests(h) != self._calm.digests for h in range(HOSTS)):
            problems.append("digests of the last checkpoint differ")
        problems += machines.leftovers()
        text = f"{'; '.join(problems)}\n{machines.text()[-4000:]}" if problems else ""
        self._add(Outcome(END, "silent" if problems else "survived", text))

    def _add(self, outcome: Outcome) -> None:
        found = replace(outcome, layout=self._workload.layout)
        self.outcomes.append(found)
        print(f"{found.layout}: {found}"[:3000], file=sys.stderr, flush=True)
