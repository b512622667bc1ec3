"""`thinpipe shaped -- thinpipe train`: ranks join the hosts by themselves."""

import json
import subprocess
import sys
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


@pytest.mark.dist
@pytest.mark.usefixtures("namespaces")
def test_ranks_of_emulated_hosts_train(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(200)))
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    thinpipe = [sys.executable, "-P", "-m", "thinpipe.launch"]
    train = [*thinpipe, "train", str(tmp_path / "run.toml")]
    done = subprocess.run(
        [*thinpipe, "shaped", "--hosts", "2", "--", *train],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2, 3, 4]
