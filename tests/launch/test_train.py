"""Whole runs through the command line: what they leave, and how they resume."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import run
from tests.programs import ran
from tests.texts import write_run
from thinpipe.launch.checkpoint.files import read_manifest
from thinpipe.launch.view.report.metrics import read_metrics
from thinpipe.launch.view.report.timeline import read_timeline
from thinpipe.pipeline.wire.hadamard import Hadamard

pytestmark = pytest.mark.dist

RUN = """
[run]
name = "tiny"
folder = "{folder}"
[model]
layers = 4
width = 16
heads = 2
context = 32
[data]
path = "{text}"
sequence_length = 32
train_sequences = 24
eval_sequences = 8
[pipeline]
cuts = [1, 3]
microbatches = 2
device = "cpu"
[[boundary]]
forward = {{ kind = "aqsgd", bits = 3 }}
backward = {{ kind = "direct", bits = 6, rounding = "stochastic" }}
[train]
epochs = 3
batch_size = 5
warmup_steps = 2
[checkpoint]
every_steps = 4
keep = 9
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path, RUN)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run folder that a true command has left, and what it said."""
    folder = tmp_path_factory.mktemp("trained")
    path = write_run(folder, RUN)
    for name in ("launch", "pipeline", "torch", "transformers"):  # a user's own files, never run
        (folder / f"{name}.py").write_text("raise SystemExit(7)")
    done = ran(*command(path), cwd=folder, OMP_NUM_THREADS="1")  # as others that go on with it
    assert "Traceback" not in done.stderr
    return folder / "run", done.stdout


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-P", "-m", "thinpipe.launch", "train", *map(str, arguments)]


def thinpipe(*arguments: object, code: int | None = None) -> subprocess.CompletedProcess[str]:
    """`thinpipe train` without its start: see `tests.commands`; no GPU survives its forks."""
    if "pipeline.device=cuda" in arguments:
        return ran(*command(*arguments), code=code)
    return run("train", *arguments, code=code)


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ranks_of(launcher: int) -> dict[int, int]:
    """Process id by rank of the ranks that a command started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")  # the fork server's
            name, number = f"{(entry / 'comm').read_text(encoding='utf-8').strip()} ".split(" ", 1)
        except OSError:
            continue
        if (
            b"THINPIPE_PARENT=%d" % launcher in environment
            and name == "thinpipe"
            and number.strip().isdigit()
        ):
            found[int(number)] = int(entry.name)
    return found


def wait_until(condition: Any, limit_s: float) -> float:
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < limit_s, "waited too long"
        time.sleep(0.05)
    return time.monotonic() - start_s


def test_a_run_leaves_everything_in_its_folder(trained: tuple[Path, str]) -> None:
    folder, said = trained
    names = {path.name for path in folder.iterdir() if path.name != ".lock"}
    expected = {"config.toml", "metrics.jsonl", "summary.json", "report.html"}
    assert names == expected | {"timeline.json", "state.json", "notes.jsonl", "checkpoints"}
    records = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [record["step"] for record in records] == list(range(1, 16))
    assert "step 8, measured" in run("trace", folder).stdout
    processes = {
        e["pid"]
        for e in json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    }
    assert processes == {0, 1, 2}
    assert {w["cut"] for w in records[0]["wire"]} == {1, 3}
    assert records[-1]["loss"] < records[0]["loss"]
    assert set(records[-1]["eval"]) == {"loss", "loss_compressed"}
    assert all(0 <= record["bubble"] < 1 for record in records)
    forward = [r["wire"][0]["bytes"] for r in records]
    assert forward[5] < forward[0]  # known samples are sent as changes
    assert "sent" in said


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param([], id="ram"),
        pytest.param(
            ["--set", "memory.tier=disk", "--set", "memory.budget=20kB"],
            id="disk, not all samples",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--set", "pipeline.device=cuda"],
            id="ranks that share a GPU",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)
def test_resume_is_bit_exact_in_the_middle_of_an_epoch(
    run_file: Path, memory: list[str], trained: tuple[Path, str]
) -> None:
    whole = trained[0]
    if memory:
        assert thinpipe(run_file, *memory).returncode == 0
        whole = run_file.parent / "run"
    shutil.copytree(whole, run_file.parent / "again")
    checkpoints = run_file.parent / "again" / "checkpoints"
    for step in (12, 15):
        shutil.rmtree(checkpoints / f"step-{step}")
    (checkpoints / "latest").write_text("step-8\n")  # epoch 2 ends at step 10
    again = ["--resume", "--set", f"run.folder={run_file.parent / 'again'}"]
    thinpipe(run_file, *memory, *again, code=0)
    for step in ("step-12", "step-15"):  # the last one lacks memories
        expected = read_manifest(whole / "checkpoints" / step).parts
        assert read_manifest(checkpoints / step).parts == expected  # names and SHA-256
    first, second = (read_metrics(f / "metrics.jsonl") for f in (whole, checkpoints.parent))
    assert [(r.step, r.loss, r.wire) for r in second] == [(r.step, r.loss, r.wire) for r in first]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "now", "first_visits"),
    [
        (1, 2, 0),  # the first replica's part knows all samples
        (2, 1, 12),
    ],
)
def test_at_another_number_of_replicas_only_moved_samples_are_new(
    run_file: Path, before: int, now: int, first_visits: int
) -> None:
    changes = ("pipeline.cuts=[2]", "train.batch_size=6", "train.epochs=2")
    run = [word for change in changes for word in ("--set", change)] + ["--set"]
    thinpipe(run_file, *run, f"pipeline.replicas={before}", code=0)
    done = thinpipe(run_file, *run, f"pipeline.replicas={now}", "--resume", "--step", "4", code=0)
    assert f"replicas {before}; this run has cuts [2], replicas {now}" in done.stderr
    reported = "samples moved to another replica and are sent as first visits" in done.stderr
    assert reported == bool(first_visits)
    records = read_metrics(run_file.parent / "run" / "metrics.jsonl")
    first, second = (
        sum(record.wire[0].nbytes - 52 * record.wire[0].messages for record in epoch)
        for epoch in (records[:4], records[4:])
    )
    assert [
        sum(record.wire[0].first_visits for record in epoch) for epoch in (records[:4], records[4:])
    ] == [24, first_visits]
    fresh, change = (Hadamard(bits).capacity(32 * 16) for bits in (6, 3))
    assert first == 24 * fresh
    assert second == first_visits * fresh + (24 - first_visits) * change


def test_a_run_whose_cuts_moved_reports_all_its_bytes(run_file: Path) -> None:
    once = ["--set", "train.epochs=1"]
    folder = run_file.parent / "run"
    assert thinpipe(run_file, *once).returncode == 0
    assert read_timeline(folder).step == 4  # the last of five has fewer samples
    done = thinpipe(
        run_file, *once, "--resume", "--step", "4", "--set", "pipeline.cuts=[2, 3]", code=0
    )
    summary, records = (
        json.loads((folder / "summary.json").read_text(encoding="utf-8")),
        read_metrics(folder / "metrics.jsonl"),
    )
    methods = {(row["cut"], row["direction"]): row["method"] for row in summary["wire"]}
    assert {cut for cut, _ in methods} == {1, 2, 3}
    assert {cut for (cut, _), method in methods.items() if method == "earlier cut"} == {1}
    sent = [sum(count.nbytes for count in record.wire) for record in records]
    assert summary["totals"]["bytes"] == sum(sent)
    assert "earlier cut" in (folder / "report.html").read_text(encoding="utf-8")
    assert "earlier cut" in done.stdout


def test_a_second_run_moves_the_first_out_of_the_way(run_file: Path) -> None:
    folder = run_file.parent / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("precious")
    one = ["--set", "train.epochs=1", "--set", "pipeline.cuts=[]"]
    thinpipe(run_file, *one, code=0)
    assert (run_file.parent / "run.1" / "metrics.jsonl").read_text(encoding="utf-8") == "precious"
    before = (folder / "report.html").read_text(encoding="utf-8")
    again = thinpipe(run_file, *one, "--resume", "--set", "eval.samples=1")
    assert "all 5 steps are done" in again.stdout
    assert "what it writes now" in again.stdout
    assert (folder / "report.html").read_text(encoding="utf-8") == before


def test_a_folder_of_other_things_is_left_alone(run_file: Path) -> None:
    folder = run_file.parent / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("precious")
    done = thinpipe(run_file, "--set", "pipeline.cuts=[]", code=2)
    assert "not a run's" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "data.train_sequences=100000"], "train_sequences = 100000"),
        (["--show", "3"], "--show = 3: use a rank below 3, or -1"),
        (["--set", "run.folder={file}/a/b", "--resume"], "/a/b: {file} is a file; name another"),
        (["--resume", "--dry-run"], "no checkpoints to resume from"),
        (["--step", "6"], "--step = 6: needs --resume; add it, or remove --step"),
    ],
)
def test_user_errors_exit_with_2_before_any_rank_starts(
    run_file: Path, arguments: list[str], message: str
) -> None:
    file = run_file.parent / "text.txt"
    done = thinpipe(run_file, *(argument.format(file=file) for argument in arguments), code=2)
    assert message.format(file=file) in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (run_file.parent / "run").exists()


def sizes(folder: Path) -> dict[str, int]:
    parts = (folder / "checkpoints").rglob("*.safetensors")
    return {
        step: sum(part.stat().st_size for part in group)
        for step, group in itertools.groupby(sorted(parts), lambda part: part.parent.name)
    }


def test_a_run_that_is_done_leaves_its_weights_and_little_else(run_file: Path) -> None:
    run_file.write_text(run_file.read_text(encoding="utf-8").replace("keep = 9", ""))
    two = ("--set", "pipeline.cuts=[2]", "--set", "train.epochs=2")
    done = thinpipe(run_file, *two, code=0)
    assert " of it in 1 checkpoint report " in " ".join(done.stdout.split())
    left = sizes(run_file.parent / "run")
    assert list(left) == ["step-10"]
    thinpipe(run_file, *two, "--set", "train.decay=none", code=0)
    kept = sizes(run_file.parent / "run")
    assert list(kept) == ["step-10", "step-8"]
    row = 2 * 32 * 16  # of 24 samples at both ends, in bf16
    assert kept["step-10"] - left["step-10"] >= 2 * 24 * row


def test_a_damaged_checkpoint_is_passed_over_and_named(run_file: Path) -> None:
    two = ("--set", "pipeline.cuts=[2]", "--set", "train.epochs=1")
    assert thinpipe(run_file, *two).returncode == 0
    part = run_file.parent / "run/checkpoints/step-5/replica-0.rank-1.safetensors"
    damaged = bytearray(part.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    part.write_bytes(damaged)
    asked = thinpipe(run_file, "--resume", "--step", "5", *two, code=2)
    assert part.name in asked.stderr
    assert "--resume --step 4" in asked.stderr  # the one before is offered
    (part.parents[1] / "latest").unlink()
    done = thinpipe(run_file, "--resume", *two, code=0)
    assert f"warning: step-5 cannot be used: rank 1: {part}: sha256 is " in done.stderr
    assert "latest is missing; resuming from step-4" in done.stderr
    assert "resumed from step 4" in done.stdout
    assert [r.step for r in read_metrics(part.parents[2] / "metrics.jsonl")] == [*range(1, 6)]


def test_a_step_of_which_nothing_is_whole_is_no_reason_to_start_anew(run_file: Path) -> None:
    one = ("--set", "pipeline.cuts=[]", "--set", "train.epochs=1")
    assert thinpipe(run_file, *one).returncode == 0
    for part in (run_file.parent / "run/checkpoints").glob("step-*/*.safetensors"):
        part.write_bytes(b"")
    done = thinpipe(run_file, *one, "--resume", code=2)
    assert "no step is whole: step-5 cannot be used: rank 0: " in done.stderr
    assert "train without --resume to start over" in done.stderr


def test_resume_with_other_settings_is_rejected(run_file: Path) -> None:
    one = ["--set", "pipeline.cuts=[]", "--set", "train.epochs=1", "--set", "run.seed=0"]
    assert thinpipe(run_file, *one).returncode == 0
    text = run_file.parent / "text.txt"
    original = text.read_text(encoding="utf-8")
    text.write_text(original.replace("squared", "cubed"))
    changed = ["--set", "model.width=32", "--set", "train.epochs=3"]
    done = thinpipe(run_file, *one, "--resume", *changed)
    assert f"data.train differ; data.path = '{text}', data.tokenizer = 'bytes'" in done.stderr
    assert f"written since then: {text}; restore the old content" in done.stderr
    assert done.returncode == 2
    assert "with model.width = 16, this run has 32; with train.epochs = 1," in done.stderr
    assert '(train.epochs may change only with train.decay = "none"' in done.stderr
    (run_file.parent / "copy.txt").write_text(original)
    copy = ["--set", f"data.path={run_file.parent / 'copy.txt'}"]
    assert "all 5 steps are done" in thinpipe(run_file, *one, "--resume", *copy).stdout
