"""A machine that waits for others answers Ctrl-C and SIGTERM at once, and leaves nothing."""

import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.commands import PATIENCE_S
from tests.launch.net.ranks.test_rendezvous import foreign_port
from tests.launch.test_train import run_file, start, wait_until
from tests.ports import free_port
from tests.processes import lives

__all__ = ["foreign_port", "run_file"]

AT_ONCE_S = 20.0
"""Two seconds on an idle machine; it would wait for the others for minutes."""


def stopped(run_file: Path, port: int, number: signal.Signals) -> list[str]:
    """What a machine that waits at a port says when it is asked to stop."""
    with tempfile.TemporaryDirectory(prefix="thinpipe-test-") as folder:
        meeting = ["--nnodes", "3", "--rdzv", f"127.0.0.1:{port}"]
        process = start(run_file, *meeting, TMPDIR=folder)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "starting 1 rank on this machine\n"
            lines = [process.stdout.readline()]
            children = psutil.Process(process.pid).children(recursive=True)
            start_s = time.monotonic()
            process.send_signal(number)
            lines += process.communicate(timeout=PATIENCE_S)[0].splitlines()
            assert time.monotonic() - start_s < AT_ONCE_S
            assert process.returncode == 128 + number
            assert [*Path(folder).iterdir()] == []
            wait_until(lambda: not any(map(lives, children)), PATIENCE_S)  # process 1 may reap none
        finally:
            process.kill()
            process.wait()
    assert lines[0].startswith(f"waiting for 3 machines at 127.0.0.1:{port}, at most ")
    return lines[1:]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_so_in_a_line(run_file: Path, number: signal.Signals) -> None:
    assert stopped(run_file, free_port(), number) == ["asked to stop before the run began"]


@pytest.mark.slow
def test_it_does_so_while_it_connects(run_file: Path, foreign_port: int) -> None:
    """To a store that does not answer, inside a call to C++."""
    said = stopped(run_file, foreign_port, signal.SIGINT)
    assert said == ["asked to stop before the run began"]
