"""Emulated networks, for tests that skip where none can be made."""

import pytest

from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec


def shaped(spec: NetworkSpec) -> ShapedNetwork:
    try:
        return ShapedNetwork(spec)
    except ShapedError as error:
        pytest.skip(str(error))
