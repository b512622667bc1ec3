"""The machine of --rdzv is lost: the others go on where another one coordinates."""

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.launch.run.elastic.launchers import SAMPLES, Launchers
from tests.ports import free_port
from tests.processes import lives, signal_all
from tests.waiting import until

pytestmark = [pytest.mark.dist, pytest.mark.slow]


class Apart(Launchers):
    """Machines with names and run folders of their own; the first has the store."""

    def start(self, number: int, *options: str) -> "subprocess.Popen[bytes]":
        own = [f"network.name=host{number}", f"run.folder={self.folder / str(number)}"]
        return super().start(number, *options, *(w for one in own for w in ("--set", one)))

    @property
    def run_folder(self) -> Path:
        return self.folder / "0"

    def start_again(self, *numbers: int) -> None:
        where, count = f"127.0.0.1:{free_port()}", str(len(numbers))
        words = ["--resume", "--nnodes", count, "--rdzv", where, "--set"]
        again = [self.start(n, *words, f"pipeline.replicas={count}") for n in numbers]
        self.launchers = again


@pytest.mark.parametrize("come", [(1, 2), (2, 0, 1)], ids=["the others", "all"])
def test_one_command_goes_on_under_another_coordinator(
    tmp_path: Path, come: tuple[int, ...]
) -> None:
    run = Apart(tmp_path)
    run.wait_for_step(13)
    first = psutil.Process(run.launchers[0].pid)
    killed = [first, *first.children(recursive=True)]
    signal_all(killed, signal.SIGSTOP)
    signal_all(killed, signal.SIGKILL)
    assert run.done() == [-signal.SIGKILL, 1, 1], [run.said(n) for n in range(3)]
    assert all("--resume" in run.said(number) for number in (1, 2)), run.said(1)
    run.start_again(*come)
    assert run.done() == [0] * len(come), [run.said(n) for n in come]
    said = run.said(come[0])
    assert "resumed from step 10" in said
    assert ("samples go to 2 replicas in place of 3" in said) == (len(come) == 2)
    (written,) = tmp_path.glob("*/summary.json")  # by rank 0, whose machine's name comes first
    summary = json.loads(written.read_text(encoding="utf-8"))
    assert summary["samples"]["2"] == SAMPLES
    until(lambda: not any(map(lives, killed)))
