"""Timings of blocks, and warnings when other processes interfere."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.training import config
from thinpipe.launch.cuts.profile import interference_warning, measure_blocks, steady_median

CORES = os.cpu_count() or 1
STEADY = [0.030, 0.031, 0.032, 0.030, 0.033]


def warn(rounds_s: list[list[float]], *, background_cores: float) -> str | None:
    return interference_warning(rounds_s, background_cores=background_cores, threads=CORES)


def test_rounds_with_interference_do_not_count() -> None:
    assert steady_median(STEADY) == 0.031
    assert steady_median([0.440, 0.031, 0.430, 0.033, 0.410, 0.032]) == 0.032


def test_widely_varying_rounds_cause_a_warning_with_numbers() -> None:
    spread = [0.030, 0.030, 0.300, 0.300, 0.030, 0.300, 0.300]
    warning = warn([STEADY, spread], background_cores=0.0)
    assert warning is not None
    assert "the same block vary from 30 ms to 300 ms: they may be 10.0 times too" in warning
    assert "run again on an idle machine" in warning
    assert warn([STEADY, [0.5, *STEADY]], background_cores=0.0) is None  # a single outlier


def test_shared_cores_cause_a_warning_however_even_the_rounds_are() -> None:
    warning = warn([STEADY], background_cores=CORES)
    assert warning is not None
    assert f"keep {CORES}.0 of this machine's {CORES} cores busy" in warning
    assert "they may be 2.0 times too long" in warning
    assert warn([STEADY], background_cores=0.1) is None


@pytest.mark.slow
def test_blocks_that_do_not_fit_memory_together_are_measured_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = measure_blocks(config()).costs
    monkeypatch.setattr("thinpipe.launch.cuts.profile.free_memory", lambda: 0.0)
    alone = measure_blocks(config()).costs
    assert len(alone) == len(together) == 4


@pytest.fixture
def busy() -> Iterator[None]:
    """Every core is busy with two other processes."""
    command = [sys.executable, "-c", "while True: pass"]
    workers = [subprocess.Popen(command) for _ in range(2 * CORES)]
    yield
    for worker in workers:
        worker.kill()
        worker.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("busy")
def test_blocks_are_measured_on_a_busy_machine_with_a_warning() -> None:
    measured = measure_blocks(config())
    assert len(measured.costs) == 4
    assert measured.warning is not None
    assert "run again on an idle machine" in measured.warning
