"""Times that other work spoiled are told from those that it did not."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.training import config
from thinpipe.launch.plan.disturbance import disturbance, undisturbed
from thinpipe.launch.plan.profile import measure_blocks

CORES = os.cpu_count() or 1
STEADY = [0.030, 0.031, 0.032, 0.030, 0.033]


def test_rounds_that_were_disturbed_do_not_count() -> None:
    assert undisturbed(STEADY) == 0.031
    assert undisturbed([0.440, 0.031, 0.430, 0.033, 0.410, 0.032]) == 0.032


def test_rounds_that_spread_widely_are_told_with_numbers() -> None:
    spread = [0.030, 0.030, 0.300, 0.300, 0.030, 0.300, 0.300]
    told = disturbance([STEADY, spread], others=0.0, threads=CORES)
    assert told is not None
    assert "what takes 30 ms once takes 300 ms another time: times may be 10.0 times" in told
    assert "run again when it is idle" in told
    assert disturbance([STEADY, [0.5, *STEADY]], others=0.0, threads=CORES) is None  # a hiccup


def test_work_that_leaves_too_few_cores_is_told_however_even_the_rounds_are() -> None:
    told = disturbance([STEADY], others=CORES, threads=CORES)
    assert told is not None
    assert f"keeps {CORES}.0 of its {CORES} cores busy" in told
    assert "times may be 2.0 times too long" in told
    assert disturbance([STEADY], others=0.1, threads=CORES) is None


def test_blocks_that_memory_does_not_hold_at_once_are_measured_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = measure_blocks(config()).costs
    monkeypatch.setattr("thinpipe.launch.plan.profile.free_memory", lambda: 0.0)
    alone = measure_blocks(config()).costs
    assert [block.parameters for block in alone] == [block.parameters for block in together]


@pytest.fixture
def busy() -> Iterator[None]:
    """Every core has other work, and more of it waits."""
    command = [sys.executable, "-c", "while True: pass"]
    workers = [subprocess.Popen(command) for _ in range(2 * CORES)]
    yield
    for worker in workers:
        worker.kill()
        worker.wait()


@pytest.mark.usefixtures("busy")
def test_blocks_are_measured_beside_other_work_with_a_warning() -> None:
    measured = measure_blocks(config())
    assert len(measured.costs) == 4
    assert measured.warning is not None
    assert "run again when it is idle" in measured.warning
