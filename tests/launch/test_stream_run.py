"""A run over a stream, stopped in the middle of a block, goes on bit for bit."""

import json
from pathlib import Path

import pytest

from tests.commands import run
from tests.texts import write_run
from thinpipe.launch.view.report.metrics import read_metrics

pytestmark = pytest.mark.dist
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


def _write_run(folder: Path, rows: int) -> Path:
    """Of a stream of so many rows."""
    texts = [f"{n} squared is {n * n}, and {n} doubled {2 * n}." for n in range(rows)]
    stream = folder / "rows.jsonl"
    stream.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return write_run(folder, RUN, rows=stream)


def _losses(folder: Path) -> list[float]:
    return [record.loss for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_a_run_over_a_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    run_file = _write_run(tmp_path, 400)
    run("train", run_file)
    whole = _losses(tmp_path / "run")
    assert len(whole) == 8
    again = ["--set", f"run.folder={tmp_path / 'parts'}"]
    for steps, resume in ((5, []), (8, ["--resume"])):
        limit = ["--set", f"train.max_steps={steps}"]
        run("train", run_file, *again, *limit, *resume)
        assert _losses(tmp_path / "parts") == whole[:steps]


def test_steps_end_a_run_within_an_epoch(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, RUN, lines=400, rows=tmp_path / "text.txt")
    changes = ["data.text_field=", "data.stream_block=", "data.train_sequences=24"]
    changes += ["train.epochs=3", "train.max_steps=7", "pipeline.replicas=1", "pipeline.cuts=[]"]
    settings = [part for change in changes for part in ("--set", change)]
    run("train", run_file, *settings)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record.epoch for record in records] == [1] * 6 + [2]
    assert [record.step for record in records if record.eval] == [6, 7]


def test_a_stream_that_ends_early_ends_the_run_and_is_saved(tmp_path: Path) -> None:
    run_file = _write_run(tmp_path, 90)
    settings = ["--set", "train.max_steps=99", "--set", "pipeline.cuts=[]"]
    done = run("train", run_file, *settings)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert 5 < len(records) < 99
    assert f"the stream of samples ended after {len(records)} steps" in done.stdout + done.stderr
    assert [*(tmp_path / "run" / "checkpoints").glob(f"*{len(records)}*")]
    state = json.loads((tmp_path / "run" / "state.json").read_text(encoding="utf-8"))
    assert state["ended"] == f"the stream of samples ended after {len(records)} steps"
