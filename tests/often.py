"""Cases of a law that are tried in every run of the tests; others only by `make test-all`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], often: Callable[[Any], bool]) -> list[Any]:
    """All cases for `parametrize`; those that are not tried often are marked slow."""
    return [case if often(case) else pytest.param(case, marks=pytest.mark.slow) for case in cases]
