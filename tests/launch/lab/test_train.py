"""`thinpipe shaped -- thinpipe train`: ranks join the hosts by themselves."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launch.test_train import run_file
from tests.waiting import PATIENCE_S

__all__ = ["run_file"]


def over_two_hosts(run_file: Path, *settings: str) -> "subprocess.CompletedProcess[str]":
    thinpipe = [sys.executable, "-P", "-m", "thinpipe.launch"]
    train = [*thinpipe, "train", str(run_file)]
    train += [word for setting in ("pipeline.cuts=[2]", *settings) for word in ("--set", setting)]
    command = [*thinpipe, "shaped", "--hosts", "2", "--", *train]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.dist
@pytest.mark.usefixtures("namespaces")
def test_ranks_of_emulated_hosts_train(run_file: Path) -> None:
    done = over_two_hosts(run_file)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = (run_file.parent / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [*range(1, 16)]


@pytest.mark.dist
@pytest.mark.usefixtures("namespaces")
def test_ranks_that_do_not_fit_together_leave_nothing(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # short enough for sockets
        monkeypatch.setenv("TMPDIR", place)
        done = over_two_hosts(run_file, "train.lr=0.{rank}1")
        assert "rank 1 has train.lr = 0.11, rank 0 has 0.01" in done.stdout + done.stderr
        assert done.returncode == 2
        assert not list(Path(place).glob("thinpipe*"))
