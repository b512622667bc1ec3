"""`thinpipe shaped -- thinpipe train`: ranks join the hosts by themselves."""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launch.test_train import run_file
from tests.programs import ran

__all__ = ["run_file"]


def over_two_hosts(run_file: Path, *settings: str, code: int = 0) -> str:
    thinpipe = [sys.executable, "-P", "-m", "thinpipe.launch"]
    train = [*thinpipe, "train", str(run_file)]
    train += [word for setting in ("pipeline.cuts=[2]", *settings) for word in ("--set", setting)]
    done = ran(*thinpipe, "shaped", "--hosts", "2", "--", *train, code=code)
    return done.stdout + done.stderr


@pytest.mark.dist
@pytest.mark.usefixtures("namespaces")
def test_ranks_of_emulated_hosts_train(run_file: Path) -> None:
    over_two_hosts(run_file)
    steps = (run_file.parent / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [*range(1, 16)]


@pytest.mark.dist
@pytest.mark.usefixtures("namespaces")
def test_ranks_that_do_not_fit_together_leave_nothing(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # short enough for sockets
        monkeypatch.setenv("TMPDIR", place)
        said = over_two_hosts(run_file, "train.lr=0.{rank}1", code=2)
        assert "rank 1 has train.lr = 0.11, rank 0 has 0.01" in said
        assert not list(Path(place).glob("thinpipe*"))
