"""Over four hundred mistakes: each is named with its remedy, with exit code 2 and no traceback."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run
from tests.huggingface import saved_model

ANSWERS = Path(__file__).with_name("mistakes.jsonl")
MISTAKES: list[dict[str, Any]] = [
    json.loads(line) for line in ANSWERS.read_text(encoding="utf-8").splitlines()
]
RUN = """\
[run]
name = "r"
[model]
layers = 4
width = 32
heads = 2
context = 32
[data]
path = "text.txt"
sequence_length = 32
train_sequences = 64
eval_sequences = 8
[pipeline]
cuts = [2]
microbatches = 2
[[boundary]]
forward = { kind = "aqsgd", bits = 4 }
backward = { kind = "direct", bits = 8 }
[train]
epochs = 1
batch_size = 8
"""
WEIGHTS = """\
[run]
name = "r"
[model]
pretrained = "../base"
lora = { rank = 4 }
[data]
path = "text.txt"
tokenizer = "bytes"
sequence_length = 16
train_sequences = 32
eval_sequences = 8
[pipeline]
cuts = [1]
microbatches = 2
[[boundary]]
forward = { kind = "raw" }
backward = { kind = "raw" }
[train]
epochs = 1
batch_size = 8
"""
HOSTS = """\
rdzv = "10.0.0.1:29500"
[[host]]
name = "a"
checkout = "thinpipe"
[[host]]
name = "b"
checkout = "thinpipe"
"""
MODEL = """\
import torch, torch.nn.functional as F
from torch import nn

VOCAB = 30

def model():
    return nn.Sequential(nn.Embedding(VOCAB, 16), *[nn.Linear(16, 16) for _ in range(3)],
                         nn.Linear(16, VOCAB))

def loss(logits, target):
    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    return total, target.numel()

class Texts(torch.utils.data.Dataset):
    def __init__(self): self.x = torch.arange(64 * 9).reshape(64, 9) % VOCAB
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        x = self.x[i]
        return x[:-1], x[1:]

def training(): return Texts()
"""
PROGRAM = """\
import torch, thinpipe as tp
import mymodel

pipe = tp.Pipeline(mymodel.model, mymodel.loss, cuts=[2], microbatches=2,
                   boundary=tp.Boundary(forward=tp.AQSGD(bits=4), backward=tp.Direct(bits=8)))
run = tp.Run("runs/mine", pipe, torch.optim.AdamW(pipe.parameters(), 1e-3), resume="never")
for epoch in run.epochs(1):
    for batch in run.batches(mymodel.Texts(), size=16):
        run.step(batch)
"""


def write_good(folder: Path) -> None:
    good = {"run.toml": RUN, "hosts.toml": HOSTS, "mymodel.py": MODEL, "mine.py": PROGRAM}
    good["text.txt"] = "the quick brown fox jumps over the lazy dog, again\n" * 400
    good["lora.toml"] = WEIGHTS
    good["full.toml"] = WEIGHTS.replace("lora = { rank = 4 }", "")
    good["random.toml"] = WEIGHTS.replace("pretrained", "config")
    for name, text in good.items():
        (folder / name).write_text(text, encoding="utf-8")


def train_once(folder: Path) -> Path:
    """The runs of a folder, with a finished one that is named done."""
    if not folder.exists():
        folder.mkdir()
        write_good(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            run("train", "run.toml", "--show", -1, "--set", "run.name=done")
    return folder / "runs"


def problem(mistake: dict[str, Any], folder: Path) -> str | None:
    """What is wrong with the answer."""
    folder.mkdir()
    write_good(folder)
    if mistake["group"] == "weights" and not (folder.parent / "base").exists():
        saved_model("llama", folder.parent / "base")
    if "runs/done" in str(mistake):
        shutil.copytree(train_once(folder.parent / "finished"), folder / "runs")
    for name, text in mistake.get("files", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        environment = {"COLUMNS": "200", **mistake.get("environment", {})}
        done = run(*shlex.split(mistake["command"]), code=None, environment=environment)
    said = done.stderr.replace(str(folder), ".")
    missing = [words for words in mistake["words"] if words not in said]
    if done.returncode == 2 and not missing and "Traceback" not in said:
        return None
    return f"{mistake['command']} {mistake.get('files', '')}: exit {done.returncode}: {said}"


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted({mistake["group"] for mistake in MISTAKES}))
def test_every_mistake_is_answered(tmp_path: Path, group: str) -> None:
    chosen = [mistake for mistake in MISTAKES if mistake["group"] == group]
    problems = [problem(mistake, tmp_path / str(n)) for n, mistake in enumerate(chosen)]
    assert [*filter(None, problems)] == []


def test_one_mistake_of_each_kind_is_answered(tmp_path: Path) -> None:
    """For each change; all of them are for the slow run."""
    found = {mistake["group"]: mistake for mistake in reversed(MISTAKES)}
    problems = [problem(mistake, tmp_path / group) for group, mistake in found.items()]
    assert [*filter(None, problems)] == []
    assert len(MISTAKES) >= 400
