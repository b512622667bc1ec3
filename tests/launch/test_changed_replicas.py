"""A run goes on with other replicas within an epoch: samples, steps and rates add up."""

import itertools
import json
from pathlib import Path

import pytest

from tests.commands import Command
from tests.texts import write_run
from thinpipe.launch.view.report.metrics import StepRecord, read_metrics

pytestmark = pytest.mark.dist

RUN = """
[run]
name = "tiny"
folder = "{folder}"
[model]
layers = 2
width = 16
heads = 2
context = 16
[data]
path = "{text}"
sequence_length = 16
train_sequences = 41
eval_sequences = 4
[pipeline]
device = "cpu"
[train]
epochs = 2
batch_size = 4
warmup_steps = 0
decay = "linear"
[checkpoint]
every_steps = 5
keep = 9
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path, RUN)


def train(run_file: Path, replicas: int, step: int | None = None) -> tuple[str, list[StepRecord]]:
    """What it says, and its steps; from the checkpoint of a step if there is one."""
    resume = [] if step is None else ["--resume", "--step", step]
    done = Command("train", run_file, *resume, "--set", f"pipeline.replicas={replicas}").done(
        code=0
    )
    return done.stdout, read_metrics(run_file.parent / "run" / "metrics.jsonl")


def samples(run_file: Path) -> dict[str, int]:
    summary = json.loads((run_file.parent / "run" / "summary.json").read_text(encoding="utf-8"))
    found: dict[str, int] = summary["samples"]
    return found


@pytest.mark.slow
def test_the_rest_of_the_epoch_is_shared_anew(run_file: Path) -> None:
    _, undisturbed = train(run_file, 1)
    assert len(undisturbed) == 22
    assert samples(run_file) == {"1": 41, "2": 41}
    said, records = train(run_file, 2, step=5)
    assert (
        "samples go to 2 replicas in place of 1: the 21 samples left of epoch 1 take 6 steps, each "
        "sample once; the run has 21 steps in place of 22"
    ) in " ".join(said.split())
    assert samples(run_file) == {"1": 41, "2": 40}
    assert [record.epoch for record in records] == [1] * 11 + [2] * 10
    assert records[:5] == undisturbed[:5]
    rates = [record.lr for record in records]
    assert rates[:6] == [record.lr for record in undisturbed[:6]], "it does not jump"
    falls = [before - after for before, after in itertools.pairwise(rates[5:])]
    assert falls == pytest.approx([rates[5] / 16] * 15)
    _goes_on_from_there(run_file, records)


def _goes_on_from_there(run_file: Path, through: list[StepRecord]) -> None:
    """After a resume without a change, and after a second change in the epoch."""
    said, again = train(run_file, 2, step=10)
    assert "samples go to" not in said
    assert [(r.loss, r.lr) for r in again] == [(r.loss, r.lr) for r in through]
    said, records = train(run_file, 4, step=10)
    assert "samples go to 4 replicas in place of 2: the 2 samples left of epoch 1" in " ".join(
        said.split()
    )
    assert samples(run_file) == {"1": 41, "2": 40}
    assert [record.epoch for record in records] == [1] * 11 + [2] * 10
    assert records[10].samples == 2
    assert records[10].tokens == 32  # of four replicas, two have a sample that does not count
