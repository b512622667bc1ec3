"""Waiting for a state, so that no test hopes that it has come."""

import time
from collections.abc import Callable

PATIENCE_S = 240
"""Guards against hanging: long for a busy machine, short beside what is waited for otherwise."""


def until(state: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    """Return when `state()` is true."""
    deadline_s = time.monotonic() + limit_s
    while not state():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.005)
