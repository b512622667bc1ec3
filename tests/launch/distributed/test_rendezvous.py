"""Machines log that they wait for others, and time out as announced."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.launch.test_train import run_file, thinpipe
from tests.ports import free_port

__all__ = ["run_file"]

LIMIT_S = 3
START_S = 45.0
"""Much more than a process takes to start, much less than torch waits for an answer."""


@pytest.fixture
def foreign_port() -> Iterator[int]:
    """Of a program that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def waited(run_file: Path, port: int) -> str:
    """Output of a machine that waits for two others at a port."""
    limit = ["--set", f"pipeline.peer_timeout_s={LIMIT_S}"]
    start_s = time.monotonic()
    done = thinpipe(run_file, *limit, "--nnodes", "3", "--rdzv", f"127.0.0.1:{port}")
    assert time.monotonic() - start_s < LIMIT_S + START_S
    assert done.returncode == 1
    limits = f"{LIMIT_S} s (pipeline.peer_timeout_s)"
    first, last = done.stderr.splitlines()
    assert first == f"waiting for 3 machines at 127.0.0.1:{port}, at most {limits}"
    assert last.startswith(f"error: 3 machines at 127.0.0.1:{port} did not join within {limits}: ")
    return last


def test_a_single_machine_times_out(run_file: Path) -> None:
    assert "only 1 joined; run `thinpipe doctor`" in waited(run_file, free_port())


def test_another_program_at_the_port_does_not_extend_the_timeout(
    run_file: Path, foreign_port: int
) -> None:
    assert "(is the port in use by another program?)" in waited(run_file, foreign_port)
