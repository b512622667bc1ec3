"""A run over a stream, stopped in the middle of a block, goes on bit for bit."""

import json
from pathlib import Path

import pytest

from tests.commands import Command
from thinpipe.launch.view.report.metrics import read_metrics

RUN = """
[run]
folder = "{folder}"
[model]
layers = 4
width = 16
heads = 2
context = 32
[data]
path = "{rows}"
text_field = "text"
sequence_length = 32
train_sequences = "all"
eval_sequences = 4
stream_block = 24
[pipeline]
cuts = [2]
replicas = 2
microbatches = 2
device = "cpu"
[[boundary]]
forward = {{ kind = "stateless", bits = 5 }}
backward = {{ kind = "stateless", bits = 6 }}
[train]
epochs = 1
max_steps = 8
batch_size = 4
warmup_steps = 2
decay = "none"
[checkpoint]
every_steps = 5
keep = 9
"""


def _losses(folder: Path) -> list[float]:
    return [record.loss for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_over_a_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    rows = [{"text": f"{n} squared is {n * n}, and {n} doubled {2 * n}."} for n in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN.format(folder=tmp_path / "whole", rows=tmp_path / "rows.jsonl"))
    done = Command("train", run_file).done()
    assert done.returncode == 0, done.stderr
    whole = _losses(tmp_path / "whole")
    assert len(whole) == 8
    again = ["--set", f"run.folder={tmp_path / 'parts'}"]
    for steps, resume in ((5, []), (8, ["--resume"])):
        limit = ["--set", f"train.max_steps={steps}"]
        done = Command("train", run_file, *again, *limit, *resume).done()
        assert done.returncode == 0, done.stderr
        assert _losses(tmp_path / "parts") == whole[:steps]


@pytest.mark.dist
def test_steps_end_a_run_within_an_epoch(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(400)))
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN.format(folder=tmp_path / "run", rows=text))
    changes = ["data.text_field=", "data.stream_block=", "data.train_sequences=24"]
    changes += ["train.epochs=3", "train.max_steps=7", "pipeline.replicas=1", "pipeline.cuts=[]"]
    settings = [part for change in changes for part in ("--set", change)]
    done = Command("train", run_file, *settings).done()
    assert done.returncode == 0, done.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record.epoch for record in records] == [1] * 6 + [2]
    assert [record.step for record in records if record.eval] == [6, 7]


@pytest.mark.dist
def test_a_stream_that_ends_early_ends_the_run_and_is_saved(tmp_path: Path) -> None:
    rows = [{"text": f"{n} squared is {n * n}, and {n} doubled {2 * n}."} for n in range(90)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN.format(folder=tmp_path / "run", rows=tmp_path / "rows.jsonl"))
    settings = ["--set", "train.max_steps=99", "--set", "pipeline.cuts=[]"]
    done = Command("train", run_file, *settings).done()
    assert done.returncode == 0, done.stderr
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert 5 < len(records) < 99
    assert f"the stream of samples ended after {len(records)} steps" in done.stdout + done.stderr
    assert [*(tmp_path / "run" / "checkpoints").glob(f"*{len(records)}*")]
    state = json.loads((tmp_path / "run" / "state.json").read_text(encoding="utf-8"))
    assert state["ended"] == f"the stream of samples ended after {len(records)} steps"
