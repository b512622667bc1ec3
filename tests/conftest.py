"""Fixtures shared by all tests."""

import pytest
import torch

from tests.ranks import Ranks, run_ranks


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def ranks() -> Ranks:
    """`ranks(4, function, *args)` calls `function(rank, *args)` in four processes."""
    return run_ranks
