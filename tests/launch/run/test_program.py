"""A user's own programs: from a script to a model that plain torch loads."""

import contextlib
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from tests.commands import run
from tests.programs import ran
from tests.shaped import shaped
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.trained.model import load
from thinpipe.launch.view.report.metrics import read_metrics

pytestmark = pytest.mark.dist

MODULE = """
import torch, torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n = nn.LayerNorm(d)
        self.f = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
    def forward(self, x):
        return x + self.f(self.n(x))

def model():
    return nn.Sequential(nn.Embedding(60, 16), *[Block(16) for _ in range(6)], nn.Linear(16, 60))

class Texts(torch.utils.data.Dataset):
    def __init__(self, path): self.x = torch.load(path)
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i, :-1], self.x[i, 1:]

def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()

def training(): return Texts("train.pt")
def held_out(): return Texts("eval.pt")
"""

PROGRAM = """
import os, sys, torch, thinpipe as tp
from own import Texts, loss, model

pipe = tp.Pipeline(model, loss, cuts=[2, 5], microbatches=4, device="cpu", replicas={replicas},
                   exchange="{exchange}",
                   boundary=tp.Boundary(forward=tp.AQSGD(bits=4), backward=tp.Direct(bits=8)))
step = None
run = tp.Run("runs/mine", pipe, torch.optim.AdamW(pipe.parameters(), 1e-2))
for epoch in run.epochs(3):
    if epoch == int(os.environ.get("STOP_AT", 9)):
        raise KeyError("stopped")
    for batch in run.batches(Texts("train.pt"), size=8):
        step = run.step(batch)
        run.log(twice=2 * step.loss)
    found = run.evaluate(Texts("eval.pt"))
run.save_model("mine.safetensors")
if step:
    print(f"{{sorted(found)}} {{step.bytes_per_cut}} {{step.skipped}}")
"""

TWIN = """
[run]
folder = "runs/twin"
[model]
factory = "own:model"
loss = "own:loss"
[data]
factory = "own:training"
eval_factory = "own:held_out"
[pipeline]
cuts = [2, 5]
device = "cpu"
[[boundary]]
forward = { kind = "aqsgd", bits = 4 }
backward = { kind = "direct", bits = 8 }
[train]
optimizer = "torch.optim:AdamW"
lr = 1e-2
epochs = 3
batch_size = 8
warmup_steps = 0
decay = "none"
clip_norm = 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    return tmp_path


def fill(folder: Path) -> None:
    (folder / "own.py").write_text(MODULE)
    write_program(folder)
    (folder / "run.toml").write_text(TWIN)
    starts = torch.arange(24)[:, None]
    samples = (starts * 7 + torch.arange(13) * (1 + starts % 3)) % 60
    torch.save(samples[:16], folder / "train.pt")
    torch.save(samples[16:], folder / "eval.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the program has run to its end, next to an earlier run; and what it said."""
    folder = tmp_path_factory.mktemp("trained")
    fill(folder)
    program = folder / "mine.py"
    program.write_text(program.read_text().replace("1e-2)", '1e-2), writers=["tensorboard"]'))
    (folder / "runs/mine").mkdir(parents=True)
    (folder / "runs/mine/metrics.jsonl").write_text("precious")
    with contextlib.chdir(folder):
        return folder, run("run", "mine.py").stdout


def write_program(folder: Path, replicas: int = 1, exchange: str = "allreduce") -> None:
    (folder / "mine.py").write_text(PROGRAM.format(replicas=replicas, exchange=exchange))


def write_changed(name: str, old: str, new: str) -> None:
    """The program, with one change."""
    Path(name).write_text(Path("mine.py").read_text(encoding="utf-8").replace(old, new))


def losses(folder: Path) -> list[float]:
    return [record.loss for record in read_metrics(folder / "metrics.jsonl")]


def own_module() -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(MODULE, found)
    return found


def test_the_documented_program_runs_and_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "own_code.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    (folder / "documented.py").write_text(program.replace("256", "32").replace("12", "6"))
    torch.save(torch.load("train.pt").repeat(2, 1), "train.pt")
    run("run", "documented.py")
    assert len(losses(folder / "runs/mine")) == 3
    assert Path("mine.safetensors").stat().st_mode & 0o044, "others may read it"
    # its functions are the program's own, which is found wherever this is called
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    expected = load_file("../mine.safetensors")
    loaded = load(folder / "runs/mine")
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert type(loaded[1]).__name__ == "Block"
    assert run("report", folder / "runs/mine").returncode == 0
    make = partial(nn.Sequential, *loaded)
    (folder / "documented.py").rename("documented.py")
    with pytest.raises(ConfigError, match=r"documented\.py, which is not here; put it there again"):
        load(folder / "runs/mine")
    again = load(folder / "runs/mine", model=make)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def test_a_program_trains_and_plain_torch_loads_its_model(trained: tuple[Path, str]) -> None:
    folder, said = trained
    assert "['loss', 'loss_compressed'] {2: " in said
    found = own_module()
    plain: nn.Module = found["model"]()
    plain.load_state_dict(load_file(folder / "mine.safetensors"))
    samples = torch.load(folder / "eval.pt")
    with torch.no_grad():
        total, count = found["loss"](plain(samples[:, :-1]), samples[:, 1:])
    records = read_metrics(folder / "runs/mine/metrics.jsonl")
    assert records[-1].eval is not None
    assert float(total) / count == pytest.approx(records[-1].eval["loss"], rel=1e-5)
    assert records[-1].loss < 0.8 * records[0].loss
    assert records[2].own == {"twice": pytest.approx(2 * records[2].loss)}
    assert (folder / "runs/mine/report.html").exists()
    assert (folder / "runs/mine.1/metrics.jsonl").read_text(encoding="utf-8") == "precious"


@pytest.mark.slow
def test_its_run_file_twin_does_the_same(trained: tuple[Path, str], folder: Path) -> None:
    run("train", "run.toml")
    assert losses(trained[0] / "runs/mine") == losses(folder / "runs/twin")


def test_it_goes_on_where_it_stopped_bit_for_bit(
    trained: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(trained[0], tmp_path / "again")
    monkeypatch.chdir(folder)
    whole = load_file("mine.safetensors")
    Path("mine.safetensors").unlink()
    Path("runs/mine").rename("runs/whole")
    stopped = run("run", "mine.py", code=1, environment={"STOP_AT": "2"})
    assert "KeyError: 'stopped'" in stopped.stderr
    run("run", "mine.py")
    resumed = load_file("mine.safetensors")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    assert losses(folder / "runs/mine") == losses(folder / "runs/whole")
    shown = EventAccumulator("runs/mine/tensorboard").Reload().Scalars("own/twice")
    assert [point.step for point in shown] == [1, 2, 3, 4, 5, 6]
    again = run("run", "mine.py")  # nothing is left to train
    assert "all 6 steps are done already" in again.stdout


@pytest.mark.slow
def test_leaving_early_saves_and_reports_and_can_be_resumed(
    trained: tuple[Path, str], folder: Path
) -> None:
    whole = losses(trained[0] / "runs/mine")
    evaluates = "    found = run.eval"
    write_changed("leaves.py", evaluates, f"    if epoch == 1: break\n{evaluates}")
    run("run", "leaves.py")
    assert losses(folder / "runs/mine") == whole[:4]
    assert (folder / "runs/mine/report.html").exists()
    assert Path("mine.safetensors").exists()
    run("run", "mine.py")
    assert losses(folder / "runs/mine") == whole


@pytest.mark.slow
def test_replicas_of_ones_own_model(folder: Path) -> None:
    write_program(folder, replicas=2, exchange="diloco")
    run("run", "mine.py")
    summary = json.loads((folder / "runs/mine/summary.json").read_text(encoding="utf-8"))
    assert summary["replicas"] == 2
    assert set(load_file("mine.safetensors")) == set(own_module()["model"]().state_dict())


@pytest.mark.slow
def test_muon_trains_and_resumes_bit_for_bit(folder: Path) -> None:
    chosen = ("--set", "train.optimizer=muon", "--set", "checkpoint.keep=9")
    run("train", "run.toml", *chosen)
    whole = losses(folder / "runs/twin")
    assert whole[-1] < whole[0]
    run("train", "run.toml", *chosen, "--resume", "--step", 2)
    assert losses(folder / "runs/twin") == whole


@pytest.mark.slow
def test_a_programs_own_lr_scheduler_sets_the_rates_and_goes_on_after_a_resume(
    folder: Path,
) -> None:
    made = "torch.optim.AdamW(pipe.parameters(), 1e-2)"
    with_own = PROGRAM.format(replicas=1, exchange="allreduce").replace(
        f'run = tp.Run("runs/mine", pipe, {made})',
        f"adam = {made}\ncosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 8)\n"
        'run = tp.Run("runs/mine", pipe, adam, scheduler=cosine)',
    )
    with_own = with_own.replace("step.loss)", "step.loss); cosine.step()")
    (folder / "mine.py").write_text(with_own)
    run("run", "mine.py", code=1, environment={"STOP_AT": "1"})
    run("run", "mine.py")
    rates = [100 * record.lr for record in read_metrics(folder / "runs/mine/metrics.jsonl")]
    assert rates == pytest.approx([1, 0.962, 0.854, 0.691, 0.5, 0.309], abs=5e-4)


@pytest.mark.slow
def test_a_call_that_one_rank_makes_alone_ends_with_a_sentence(folder: Path) -> None:
    call = 'run.save_model("mine.safetensors")'
    write_changed("mine.py", call, f'if os.environ["RANK"] == "0": {call}')
    done = run("run", "mine.py", code=None)
    assert done.returncode
    # whichever rank notices first
    told = "run.save_model"
    assert re.search(f"after step 6 rank . makes the call .*{told}|{told}, and rank", done.stderr)
    assert "none inside `if rank == 0`" in done.stderr
    assert len(done.stderr.splitlines()) < 12
    assert "SIGABRT" not in done.stderr


def test_what_is_no_program_is_rejected(folder: Path) -> None:
    assert "no such file" in run("run", "nothing.py", code=2).stderr
    assert "a run file; use `thinpipe train" in run("run", "run.toml", code=2).stderr
    (folder / "empty.py").write_text("print('hello')")
    assert "ended before making a thinpipe.Run" in run("run", "empty.py", code=2).stderr
    (folder / "fails.py").write_text("1 / 0")
    said = run("run", "fails.py", code=2).stderr
    assert "ZeroDivisionError" in said
    assert 'File "fails.py", line 1' in said.splitlines()[2], "its own lines only"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "the program failed:\n  File"),
        (
            "import mymodul",
            r"bad.py, line 1: the package 'mymodul' is not installed; run "
            r".*a module of your own belongs next to bad.py",
        ),
        ("import thinpipe as tp\ntp.AQSGD(bits=40)", "line 2: AqsgdConfig: bits = 40: use 8"),
        (
            "import thinpipe as tp, torch\ntp.Pipeline(torch.nn.ReLU())",
            "Pipeline: model is a ReLU; give the function that makes it",
        ),
    ],
)
def test_mistakes_in_a_program_are_told_without_our_own_frames(
    folder: Path, text: str, message: str
) -> None:
    (folder / "bad.py").write_text(text)
    said = run("run", "bad.py", code=2).stderr
    assert re.search(message, said)
    assert "launch/run" not in said


@pytest.mark.slow
def test_batches_that_are_left_out_or_changed_are_rejected(folder: Path) -> None:
    write_changed("skips.py", "step = run.step(batch)", "continue")
    said = run("run", "skips.py", code=1).stderr
    assert re.search(r"rank 0: skips.py, line \d+: step 1: its batch was not given to run.st", said)
    assert "Traceback" not in said
    write_changed("changes.py", 'Texts("train.pt")', 'Texts(["train.pt", "eval.pt"][epoch])')
    assert "activations belong to the samples" in run("run", "changes.py", code=1).stderr


def test_a_rejected_run_leaves_an_earlier_one_in_its_folder(folder: Path) -> None:
    (folder / "runs/mine").mkdir(parents=True)
    (folder / "runs/mine/metrics.jsonl").write_text("precious")
    write_changed("sized.py", "size=8", "size=800")
    said = run("run", "sized.py", code=2).stderr
    assert "train.batch_size = 800, but there are 16" in said
    assert (folder / "runs/mine/metrics.jsonl").read_text(encoding="utf-8") == "precious"


@pytest.mark.slow
def test_torchrun_runs_it_too(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "mine.py"]
    ran(*command, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    assert len(losses(folder / "runs/mine")) == 6


@pytest.mark.slow
def test_machines_with_disks_of_their_own_run_it_together(
    trained: tuple[Path, str], folder: Path
) -> None:
    keys.new(folder / "run.key")
    network = shaped(NetworkSpec.of(3, "100mbit", delay="1ms"))
    command = [sys.executable, "-P", "-m", "thinpipe.launch", "run", "--nnodes", "3"]
    command += ["--rdzv", "host0:29500", "mine.py"]

    def start(host: int) -> int:
        place = folder / f"host{host}"
        place.mkdir()
        for name in ("mine.py", "own.py", "train.pt", "eval.pt"):
            (place / name).write_bytes((folder / name).read_bytes())
        out = os.open(folder / f"log{host}", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(place)
        key = {"THINPIPE_KEY_FILE": str(folder / "run.key"), "OMP_NUM_THREADS": "1"}
        os.execve(command[0], command, {**os.environ, **key})

    with network:
        pids = [network.start(host, partial(start, host)) for host in range(3)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0, 0], "\n".join(
        (folder / f"log{host}").read_text(encoding="utf-8") for host in range(3)
    )
    assert losses(folder / "host0/runs/mine") == losses(trained[0] / "runs/mine")
    assert (folder / "host0/mine.safetensors").exists()
    assert not (folder / "host1/mine.safetensors").exists()
