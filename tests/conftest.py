"""Fixtures shared by all tests."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings

from thinpipe.launch.host.cache import CACHE

MEMORY = Path("/dev/shm")
SLOW_LIMIT_S = 3600
"""Of a slow test: some take 300 s where nothing else runs."""

# A busy machine stalls now and then, which is no fault of what is tested.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_signals() -> Iterator[None]:
    """Commands that run in the tests' own process may change how it takes signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGINT)}
    yield
    for number, action in before.items():
        signal.signal(number, action)


def pytest_configure() -> None:
    """Before workers start: they inherit what is set here."""
    gc.disable()  # a fifth of the time that collecting tests takes
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # or to ask for GPUs makes CUDA unusable in all that tests fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if _roomy(MEMORY):
        os.environ.setdefault("TMPDIR", str(MEMORY))
        tempfile.tempdir = None  # chosen anew
    if CACHE not in os.environ:  # what tests make is of no use to the user's own runs
        os.environ[CACHE] = tempfile.mkdtemp(prefix="thinpipe-tests-")
        atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


def pytest_collection_finish() -> None:
    """What is imported stays; collections, 7 % of the time, need not look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _roomy(folder: Path) -> bool:
    """Whether temporary files may lie in RAM: on a disk, fsync takes a fifth of the time."""
    if not os.access(folder, os.W_OK) or os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return False
    return min(shutil.disk_usage(folder).free, psutil.virtual_memory().available) > 8 << 30
