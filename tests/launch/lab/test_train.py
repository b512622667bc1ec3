"""`thinpipe shaped -- thinpipe train`: ranks join the hosts by themselves."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

RUN = """
[run]
folder = "{folder}/run"
[model]
layers = 2
width = 32
heads = 2
context = 32
[data]
path = "{folder}/text.txt"
sequence_length = 32
train_sequences = 16
eval_sequences = 4
[pipeline]
device = "cpu"
cuts = [1]
microbatches = 2
[train]
epochs = 2
batch_size = 8
"""


def over_two_hosts(folder: Path, *settings: str) -> "subprocess.CompletedProcess[str]":
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(200)))
    (folder / "run.toml").write_text(RUN.format(folder=folder))
    thinpipe = [sys.executable, "-P", "-m", "thinpipe.launch"]
    train = [*thinpipe, "train", str(folder / "run.toml")]
    train += [word for setting in settings for word in ("--set", setting)]
    command = [*thinpipe, "shaped", "--hosts", "2", "--", *train]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.dist
@pytest.mark.usefixtures("namespaces")
def test_ranks_of_emulated_hosts_train(tmp_path: Path) -> None:
    done = over_two_hosts(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2, 3, 4]


@pytest.mark.dist
@pytest.mark.usefixtures("namespaces")
def test_ranks_that_do_not_fit_together_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # short enough for sockets
        monkeypatch.setenv("TMPDIR", place)
        done = over_two_hosts(tmp_path, "train.lr=0.{rank}1")
        assert "rank 1 has train.lr = 0.11, rank 0 has 0.01" in done.stdout + done.stderr
        assert done.returncode == 2
        assert not list(Path(place).glob("thinpipe*"))
