"""Steps by the thousand with a fault every few hundred: nothing that processes hold grows."""

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from benchmarks.harness import format_table
from tests.faults import catalogue
from tests.faults.machines import Machines
from tests.faults.outcomes import Outcome, check
from tests.faults.scene import STEPS_PER_EPOCH
from tests.faults.test_runs import Episode, on_hosts, workload

EVERY_STEPS, SAVE_EVERY = 250, 10
SAMPLE_S, SETTLED_S = 2.0, 10.0
"""A process younger than the second is still growing to its size."""
KINDS = (
    *(f"kill: {kind}, at any time" for kind in ("rank", "supervisor", "fork server", "relay")),
    "stop: rank, 0.3 to 2 s",
    "link: cut, 0.2 to 1 s",
    "link: cut, 2 to 4 s",
    "link: interface down, 0.2 to 1 s",
    "link: resets",
    "memory: rank killed by the kernel for want of it",
    "disk: full for a while",
    "files: bit of a part, then a restart",
    "files: part missing, then a restart",
)
QUANTITIES = ("pss_mb", "descriptors", "threads")


@dataclass(frozen=True)
class Sample:
    """A process of a kind at a step: proportional set size, descriptors, threads."""

    step: int
    kind: str
    pss_mb: float
    descriptors: int
    threads: int


def growth(samples: Sequence[Sample]) -> list[list[str]]:
    """By kind and quantity: medians of the first and the last quarter, most, slope per 1,000."""
    rows = []
    for kind in sorted({sample.kind for sample in samples}):
        of_kind = [sample for sample in samples if sample.kind == kind]
        quarter, steps = max(1, len(of_kind) // 4), [sample.step / 1000 for sample in of_kind]
        for quantity in QUANTITIES:
            values = [float(getattr(sample, quantity)) for sample in of_kind]
            ends = [statistics.median(part) for part in (values[:quarter], values[-quarter:])]
            slope = statistics.linear_regression(steps, values).slope if len(set(steps)) > 1 else 0
            numbers = [f"{value:.1f}" for value in (*ends, max(values))]
            rows.append([f"{kind}, {quantity}", *numbers, f"{slope:+.2f}"])
    return rows


def _sample(machines: Machines, stop: threading.Event, samples: list[Sample]) -> None:
    """Only of hosts whose rank lives: others share nothing."""
    while not stop.wait(SAMPLE_S):
        step, training = machines.steps(), {host for host, _ in machines.processes("rank")}
        for kind in ("agent", "rank", "supervisor", "fork server", "relay"):
            for host, process in machines.processes(kind):
                try:
                    if host in training and time.time() - process.create_time() > SETTLED_S:
                        pss_mb = process.memory_full_info().pss / 1e6
                        held = (process.num_fds(), process.num_threads())
                        samples.append(Sample(step, kind, pss_mb, *held))
                except psutil.Error:  # it has ended meanwhile
                    continue


def soak(steps: int, seed: int) -> tuple[list[Outcome], list[Sample]]:
    run = workload(Path("/mnt/calm"), "4 stages", -(-steps // STEPS_PER_EPOCH), SAVE_EVERY)
    known = {fault.kind: fault for fault in catalogue.catalogue()}
    episode = Episode(Path("/mnt/soak"), run, random.Random(seed))
    machines, stop, samples = episode.machines, threading.Event(), list[Sample]()
    sampler = threading.Thread(target=_sample, args=(machines, stop, samples))
    sampler.start()
    try:
        for number, step in enumerate(range(EVERY_STEPS, run.steps, EVERY_STEPS)):
            machines.wait(lambda step=step: machines.steps() >= step or machines.has_ended(), 600)
            if not episode.strike(known[KINDS[number % len(KINDS)]]):
                break
        machines.wait(machines.has_ended, 600)
        stop.set()
        sampler.join()
        episode.end()
    finally:
        stop.set()
        machines.close()
    return episode.outcomes, samples


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(0)
def test_nothing_grows_in_thousands_of_steps(option: Callable[[str], int]) -> None:
    found = on_hosts(lambda: soak(option("soak-steps"), option("fault-seed")))
    assert isinstance(found, tuple)
    outcomes, samples = found
    rows = growth(samples)
    print(format_table(["process", "first quarter", "last quarter", "most", "per 1,000"], rows))
    check(outcomes)
    for kind, first, last, *_ in rows:
        assert float(last) <= 1.1 * float(first) + 2, kind


def test_growth_is_a_slope_per_thousand_steps() -> None:
    samples = [Sample(step, "rank", 100 + step / 500, 30, 8) for step in range(0, 4000, 100)]
    memory, descriptors, _ = growth(samples)
    assert memory == ["rank, pss_mb", "100.9", "106.9", "107.8", "+2.00"]
    assert descriptors[-1] == "+0.00"
