"""Fixtures shared by all tests."""

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.ranks import Ranks, run_ranks

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


@pytest.fixture
def ranks() -> Ranks:
    """`ranks(4, function, *args)` calls `function(rank, *args)` in four processes."""
    return run_ranks


def pytest_configure() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
