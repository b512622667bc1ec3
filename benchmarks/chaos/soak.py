"""`python -m benchmarks.chaos.soak`: thousands of steps with a fault every few hundred.

Memory (PSS), descriptors and threads of each kind of process are read all the time: they must not
grow. At its end the run must have the losses and weights of the one that nothing disturbed.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.chaos import faults
from benchmarks.chaos.live import END, Episode
from benchmarks.chaos.machines import Machines, isolate
from benchmarks.chaos.outcome import Outcome, table
from benchmarks.chaos.scene import STEPS_PER_EPOCH
from benchmarks.chaos.workload import LAYOUTS, Workload

_SAMPLE_S = 2.0
_SAVE_EVERY = 10
_SETTLED_S = 10.0
"""A process younger than this is still growing to its size."""
_KINDS = (
    "kill: rank, at any time",
    "kill: supervisor, at any time",
    "kill: fork server, at any time",
    "kill: carrier, at any time",
    "stop: rank, 0.3 to 2 s",
    "link: cut, 0.2 to 1 s",
    "link: cut, 2 to 4 s",
    "link: interface down, 0.2 to 1 s",
    "link: resets",
    "wire: flipped bit",
    "memory: rank killed by the kernel for want of it",
    "disk: full for a while",
    "files: bit of a part, then a restart",
    "files: part missing, then a restart",
)


@dataclass(frozen=True)
class Sample:
    """A process of a kind at a step: proportional set size, descriptors, threads."""

    step: int
    host: int
    kind: str
    pss_mb: float
    descriptors: int
    threads: int


QUANTITIES = ("pss_mb", "descriptors", "threads")


class Sampler:
    """Reads, in a thread, what processes of hosts hold whose rank lives: others share nothing."""

    def __init__(self, machines: Machines) -> None:
        self.samples: list[Sample] = []
        self._machines, self._stop = machines, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            step = self._machines.steps()
            training = {host for host, _ in self._machines.processes("rank")}
            for kind in ("agent", "rank", "supervisor", "fork server", "carrier"):
                for host, process in self._machines.processes(kind):
                    if host in training:
                        self._read(step, host, kind, process)

    def _read(self, step: int, host: int, kind: str, process: psutil.Process) -> None:
        try:
            if time.time() - process.create_time() < _SETTLED_S:
                return
            pss_mb = process.memory_full_info().pss / 1e6
            held = (process.num_fds(), process.num_threads())
        except psutil.Error:  # it has ended meanwhile
            return
        self.samples.append(Sample(step, host, kind, pss_mb, *held))


def growth(samples: Sequence[Sample]) -> list[dict[str, object]]:
    """By kind and quantity: medians of the first and the last quarter, and the slope per 1,000."""
    found: list[dict[str, object]] = []
    for kind in sorted({sample.kind for sample in samples}):
        of_kind = [sample for sample in samples if sample.kind == kind]
        quarter = max(1, len(of_kind) // 4)
        for quantity in QUANTITIES:
            values = [float(getattr(sample, quantity)) for sample in of_kind]
            steps = [sample.step / 1000 for sample in of_kind]
            several = len(set(steps)) > 1
            slope = statistics.linear_regression(steps, values).slope if several else 0.0
            found.append(
                {
                    "kind": kind,
                    "quantity": quantity,
                    "first": statistics.median(values[:quarter]),
                    "last": statistics.median(values[-quarter:]),
                    "most": max(values),
                    "slope": slope,
                }
            )
    return found


def show_growth(rows: Sequence[Mapping[str, object]]) -> str:
    """Markdown."""
    lines = [
        "| process | quantity | first quarter | last quarter | most | per 1,000 steps |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = (f"{row[name]:.1f}" for name in ("first", "last", "most"))
        cells = [str(row["kind"]), str(row["quantity"]), *numbers, f"{row['slope']:+.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def soak(
    folder: Path, workload: Workload, every: int, seed: int
) -> tuple[list[Outcome], list[Sample]]:
    """Run it with a fault every so many steps.

    Raises:
        ShapedError: hosts cannot be emulated here.
    """
    isolate()
    calm, chance = workload.calm(), random.Random(seed)
    known = {fault.kind: fault for fault in faults.catalogue()}
    episode = Episode(folder / "soak", workload, calm)
    machines, scene = episode.machines, episode.scene(chance)
    try:
        episode.start()
        sampler = Sampler(machines)
        for number, step in enumerate(range(every, workload.steps, every)):
            machines.wait(lambda step=step: machines.steps() >= step or machines.has_ended(), 600)  # type: ignore[misc]
            if not episode.strike(scene, known[_KINDS[number % len(_KINDS)]]):
                break
        machines.wait(machines.has_ended, 600)
        sampler.stop()
        episode.judge_end(exact=True)
    finally:
        machines.close()
    return episode.outcomes, sampler.samples


def main() -> None:
    """Run, print tables, write JSON lines; exits with 1 if anything was lost, silent or left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=int, default=250, help="steps between two faults")
    parser.add_argument("--layout", choices=LAYOUTS, default="4 stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where outcomes and samples go, as JSON lines")
    options = parser.parse_args()
    epochs = -(-options.steps // STEPS_PER_EPOCH)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        workload = Workload(folder, options.layout, epochs, _SAVE_EVERY)
        outcomes, samples = soak(folder, workload, options.every, options.seed)
    if options.out is not None:
        rows = [*map(asdict, outcomes), *map(asdict, samples)]
        lines = [json.dumps(row) for row in rows]
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(table(outcomes), "\n\n", show_growth(growth(samples)), sep="")
    count = sum(outcome.kind != END for outcome in outcomes)
    print(f"\n{workload.steps} steps, {count} faults, {time.monotonic() - start_s:.0f} s")
    bad = [outcome for outcome in outcomes if outcome.verdict in ("lost", "silent")]
    for outcome in bad:
        print(f"{outcome.kind}: {outcome.verdict}: {outcome.detail}", file=sys.stderr)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
