"""How many faults, and which."""

from collections.abc import Callable

import pytest

COUNTS = {
    "file-faults": 15,
    "kill-faults": 40,
    "live-faults": 6,
    "flips": 130,  # of bits, in each kind of message: one in each byte of a frame
    "soak-steps": 750,
    "fault-seed": 1,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, count in COUNTS.items():
        parser.addoption(f"--{name}", type=int, default=count)
    parser.addoption("--only", default="", help="live faults with this in the name")


@pytest.fixture
def option(request: pytest.FixtureRequest) -> Callable[[str], int]:
    """A count from the command line; options are unknown where other folders are tested too."""
    return lambda name: request.config.getoption(name.replace("-", "_"), COUNTS[name])


@pytest.fixture
def only(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("only", "")
