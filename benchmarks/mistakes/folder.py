"""The good files that every case starts from, and a run that is done."""

import shutil
import subprocess
from pathlib import Path

from benchmarks.mistakes.cases import Case

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
    """Everything but the run that is done."""
    good = {"run.toml": RUN, "hosts.toml": HOSTS, "mymodel.py": MODEL, "mine.py": PROGRAM}
    good["text.txt"] = "the quick brown fox jumps over the lazy dog, again\n" * 400
    for name, text in good.items():
        (folder / name).write_text(text, encoding="utf-8")


def spoil(case: Case, good: Path, folder: Path) -> None:
    """A copy of the good files with one thing wrong."""
    shutil.copytree(good, folder, symlinks=True)
    if case.swap is not None:
        before, after = case.swap
        path = folder / "run.toml"
        text = path.read_text(encoding="utf-8")
        assert before in text, case
        path.write_text(text.replace(before, after, 1), encoding="utf-8")
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    if case.setup and case.command != "--":
        subprocess.run(["sh", "-c", case.setup], cwd=folder, check=True)
