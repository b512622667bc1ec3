"""Fixtures of the emulated network's tests."""

from collections.abc import Iterator

import pytest

from tests.shaped import shaped
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec


@pytest.fixture(scope="session")
def net() -> Iterator[ShapedNetwork]:
    """Three hosts without limits; tests set the rates they need. Skips without namespaces."""
    with shaped(NetworkSpec.of(3)) as network:
        yield network


@pytest.fixture
def namespaces(net: ShapedNetwork) -> None:
    """For tests that make networks of their own: skips like `net`."""
