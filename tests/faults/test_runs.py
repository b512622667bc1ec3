"""Faults in whole runs on emulated hosts, one after another: each run is restarted again and again.

Every run must end with the losses, and the digests of the last checkpoint's parts, of the run that
nothing disturbed, and leave nothing behind. The runs are small: a step takes less than 0.1 s.
"""

import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.faults import catalogue
from tests.faults.catalogue import Fault
from tests.faults.judge import LIMIT_S, Judge
from tests.faults.machines import HOSTS, Machines
from tests.faults.outcomes import Outcome, check
from tests.faults.scene import BATCH, EVAL_STEPS, SAMPLES, STEPS_PER_EPOCH, NoMomentError, Scene
from tests.namespaces import in_namespace
from thinpipe.launch.checkpoint.files import read_manifest
from thinpipe.launch.host.cache import CACHE
from thinpipe.launch.lab import linux
from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.view.report.metrics import read_metrics

LAYOUTS = {
    "4 stages": ("pipeline.cuts=[1,2,3]",),
    "2 x 2, cocktail": (
        *("pipeline.cuts=[2]", "pipeline.replicas=2"),
        *("gradcomp.method=cocktail", "checkpoint.copies=2"),
    ),
}
"""Settings by name. Only the second has second copies of checkpoints."""
CONFIG = f"""
[model]
layers = 4
width = 16
heads = 2
context = 32
[data]
path = "{{text}}"
sequence_length = 32
train_sequences = {SAMPLES}
eval_sequences = 8
[pipeline]
microbatches = 2
device = "cpu"
peer_timeout_s = 45
[network]
patience_s = 6
[[boundary]]
forward = {{{{ kind = "aqsgd", bits = 3 }}}}
backward = {{{{ kind = "direct", bits = 6, rounding = "stochastic" }}}}
[train]
epochs = {{epochs}}
batch_size = {BATCH}
warmup_steps = 2
verify_every = 5
[eval]
every_epochs = {EVAL_STEPS // STEPS_PER_EPOCH}
[checkpoint]
every_steps = {{save_every}}
keep = 3
"""
_EPOCHS, _SAVE_EVERY = 15, 2


@dataclass(frozen=True)
class Workload:
    """A run, and what it ends with where nothing disturbs it: losses and digests of its parts."""

    config: str
    layout: str
    steps: int
    losses: Sequence[float]
    digests: Sequence[str]


def workload(folder: Path, layout: str, epochs: int, save_every: int) -> Workload:
    """Train it on one machine."""
    folder.mkdir(parents=True)
    text, file = folder / "text.txt", folder / "run.toml"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(4000)), encoding="utf-8")
    config = CONFIG.format(text=text, epochs=epochs, save_every=save_every)
    file.write_text(config, encoding="utf-8")
    words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(file)]
    for setting in (f"run.folder={folder}/run", *LAYOUTS[layout]):
        words += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
    steps = epochs * STEPS_PER_EPOCH
    losses = [record.loss for record in read_metrics(folder / "run" / "metrics.jsonl")]
    manifest = read_manifest(folder / "run" / "checkpoints" / f"step-{steps}")
    return Workload(config, layout, steps, losses, [part.sha256 for part in manifest.parts])


class Episode:
    """One run from its start to its end, and the faults in it."""

    def __init__(self, folder: Path, workload: Workload, chance: random.Random) -> None:
        self.outcomes: list[Outcome] = []
        self._workload = workload
        self.machines = Machines(folder, workload.config, *LAYOUTS[workload.layout])
        self._scene = Scene(self.machines, chance, workload.steps)
        machines = self.machines
        machines.wait(lambda: machines.steps() > 3 or machines.has_ended(), LIMIT_S)

    def disturb(self, queue: Sequence[Fault]) -> int:
        """Let faults strike until the run ends; how many of the queue did."""
        machines, taken = self.machines, 0
        for fault in queue:
            taken += 1
            if not self.strike(fault):
                break
        if not machines.has_ended():
            self.strike(self._scene.chance.choice(catalogue.at_the_end()))
        self.end()
        return taken

    def strike(self, fault: Fault) -> bool:
        """Whether the run goes on."""
        try:
            fault.strike(self._scene)
            self._add(Judge(self._scene, fault, self._workload.losses).outcome())
        except NoMomentError:
            pass
        except Exception:  # a mistake of this test: shown as such, and the others go on
            self._add(Outcome(fault.kind, "lost", traceback.format_exc()))
        return not self.machines.has_ended()

    def end(self) -> None:
        """What is wrong at the end is the matter of all faults of the run."""
        machines, calm, problems = self.machines, self._workload, []
        machines.wait(machines.has_ended, 3 * LIMIT_S)
        losses = machines.losses()
        if any(machines.codes.values()) or len(losses) != calm.steps:
            problems.append(f"ended with {machines.codes} after {len(losses)} steps")
        elif losses != list(calm.losses):
            problems.append("losses differ")
        elif any(machines.digests(h) != calm.digests for h in range(HOSTS)):
            problems.append("digests of the last checkpoint differ")
        problems += machines.leftovers()
        text = f"{'; '.join(problems)}\n{machines.text()[-4000:]}" if problems else ""
        self._add(Outcome("end of a run", "silent" if problems else "survived", text))

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        print(f"{self._workload.layout}: {outcome}"[:3000], flush=True)


def inject(count: int, seed: int, only: str) -> Iterator[Outcome]:
    """Disturb runs in both layouts by turns."""
    folder, chance = Path("/mnt/runs"), random.Random(seed)
    workloads = [workload(folder / name, name, _EPOCHS, _SAVE_EVERY) for name in LAYOUTS]
    kinds = [fault for fault in catalogue.catalogue() if only in fault.kind]
    assert kinds, f"no fault has {only!r} in its name"
    queue: list[Fault] = []
    while len(queue) < count:
        queue += chance.sample(kinds, len(kinds))
    del queue[count:]
    number = 0
    while queue:
        episode = Episode(folder / str(number), workloads[number % len(workloads)], chance)
        try:
            del queue[: episode.disturb(queue)]
        finally:
            episode.machines.close()
        yield from episode.outcomes
        number += 1


def on_hosts(function: Callable[[], object]) -> object:
    """Call where disks can be mounted and RAM is this process's own; skips where it cannot be."""

    def call() -> object:
        linux.mount_tmpfs("/dev/shm")
        os.environ["TMPDIR"] = tempfile.tempdir = "/mnt"
        os.environ[CACHE] = "/mnt/cache"  # not where leftovers of runs are looked for
        # torch set it, in the folder that is hidden
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        try:
            return function()
        except ShapedError as error:
            return error

    found = in_namespace(call)
    if isinstance(found, ShapedError):
        pytest.skip(str(found))
    return found


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(0)
def test_runs_go_on_exactly_or_say_what_was_wrong(option: Callable[[str], int], only: str) -> None:
    job = partial(inject, option("live-faults"), option("fault-seed"), only)
    outcomes = on_hosts(lambda: list(job()))
    assert isinstance(outcomes, list)
    check(outcomes)
