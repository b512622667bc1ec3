"""The best step stays that when a run goes on with other stages and replicas."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.commands import run
from tests.texts import write_run
from thinpipe.launch.checkpoint import files
from thinpipe.launch.trained.model import load
from thinpipe.launch.view.report.metrics import read_metrics

RUN = """
[run]
folder = "{folder}"
[model]
layers = 4
width = 16
heads = 2
context = 16
[data]
path = "{text}"
sequence_length = 16
train_sequences = 32
eval_sequences = 16
[pipeline]
device = "cpu"
cuts = [2]
[[boundary]]
forward = {{ kind = "direct", bits = 8 }}
backward = {{ kind = "direct", bits = 8 }}
[train]
epochs = 2
batch_size = 16
warmup_steps = 0
decay = "none"
lr = {lr}
[eval]
best = "loss"
[checkpoint]
keep = 1
"""


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("lr", [1.0, 0.01])
def test_the_best_step_survives_resharding(tmp_path: Path, lr: float) -> None:
    """By a low rate the last step is the best one, by a high rate one of before."""
    run_file, folder = write_run(tmp_path, RUN, lines=400, lr=lr), tmp_path / "run"
    run("train", run_file)
    first = _best(folder)
    assert files.best(folder / "checkpoints") == first
    before = _weights(folder, "best")
    longer = ["--resume", "--set", "train.epochs=4", "--set", "pipeline.cuts=[1, 3]"]
    done = run("train", run_file, *longer)
    last = _best(folder)
    assert files.best(folder / "checkpoints") == last
    assert (last == 8) == (lr < 1)
    assert f"after step {last}" in done.stdout + done.stderr
    after, newest = _weights(folder, "best"), _weights(folder, None)
    assert _same(before, after) == (last == first)
    assert _same(newest, after) == (last == 8)
    saved = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert saved == {f"step-{last}", "step-8"}


def _best(folder: Path) -> int:
    """By what evaluations measured."""
    records = read_metrics(folder / "metrics.jsonl")
    return min((record.eval["loss"], record.step) for record in records if record.eval)[1]


def _weights(folder: Path, step: Literal["best"] | None) -> dict[str, Tensor]:
    return dict(load(folder, step=step).state_dict())


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[key], right[key]) for key in left)
