"""Programs as Python knows them: what they set up for themselves works on every rank."""

import sys
from pathlib import Path

import pytest
from torch import nn

import thinpipe as tp
from tests.commands import run
from tests.launch.test_train import run_file
from tests.programs import ran
from thinpipe.launch.config.toml import ConfigError

__all__ = ["run_file"]

pytestmark = pytest.mark.dist

PROGRAM = """
import logging, multiprocessing, os, sys
import torch, torch.nn.functional as F
from torch import nn
import thinpipe as tp
import pipeline, launch_helper  # next to the program
{before}

def model():
    return nn.Sequential(nn.Embedding(60, 16), nn.Linear(16, 16), nn.Linear(16, 60))

def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()

class Texts(torch.utils.data.Dataset):
    def __init__(self): self.x = torch.arange(160).reshape(16, 10) % 60
    def __len__(self): return len(self.x)
    def __getitem__(self, i): return self.x[i, :-1], self.x[i, 1:]

def main():
    pipe = tp.Pipeline(model, loss, cuts=[2], microbatches=2, device="cpu")
    run = tp.Run("runs/größe", pipe, torch.optim.AdamW(pipe.parameters(), 1e-3))
    for epoch in run.epochs(1):
        for batch in run.batches(Texts(), size=8):
            run.step(batch)
        {during}

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("pipeline", "launch_helper"):
        (tmp_path / f"{name}.py").write_text(f"OWN = {name!r}\n")
    return tmp_path


def write(name: str, *, before: str = "", during: str = "pass") -> None:
    Path(name).write_text(PROGRAM.format(before=before, during=during), encoding="utf-8")


def test_logging_and_start_method_are_the_programs(folder: Path) -> None:
    """So are modules of any name next to it."""
    write(
        "launch.py",
        before="""
logging.basicConfig(filename=f"log{os.environ.get('RANK', '')}", level=logging.INFO)
multiprocessing.set_start_method("spawn")
""",
        during="""
        logging.getLogger("mine").info("%s %s", pipeline.OWN, multiprocessing.get_start_method())
""",
    )
    run("run", "launch.py")
    for rank in range(2):
        assert "INFO:mine:pipeline spawn" in (folder / f"log{rank}").read_text(encoding="utf-8")


def test_its_excepthook_hears_of_a_failure(folder: Path) -> None:
    write(
        "mine.py",
        before="""
def hook(kind, error, trace):
    with open(f"heard{os.environ.get('RANK')}", "a") as file:
        file.write(f"{kind.__name__} {error} {trace is not None}\\n")
sys.excepthook = hook
""",
        during='raise KeyError(os.environ["RANK"])',
    )
    said = run("run", "mine.py", code=1).stderr
    assert "KeyError" in said
    heard = [path.read_text(encoding="utf-8") for path in folder.glob("heard?")]
    assert {line for text in heard for line in text.splitlines()} <= {
        "KeyError '0' True",
        "KeyError '1' True",
    }
    assert heard


ODD = {
    **dict.fromkeys(("PYTHONUTF8", "PYTHONCOERCECLOCALE", "COLUMNS"), "0"),
    "LC_ALL": "C",
    "TERM": "dumb",
    "PYTHONWARNINGS": "error",
    "PYTHONOPTIMIZE": "2",
    "OMP_NUM_THREADS": "1,1",
    "CUDA_VISIBLE_DEVICES": "",
}


@pytest.mark.slow
def test_a_run_trains_among_odd_surroundings(run_file: Path) -> None:
    """Files named as modules next to the run file, and whatever Python can be told."""
    for name in ("types", "random", "signal", "logging", "torch", "thinpipe", "launch"):
        (run_file.parent / f"{name}.py").write_text("raise ImportError(__file__)\n")
    command = Path(sys.executable).parent / "thinpipe"
    done = ran(command, "train", run_file.name, cwd=run_file.parent, **ODD)
    assert done.stderr == ""
    assert "step 15/15" in " ".join(done.stdout.split())


def test_without_ranks_it_is_said_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file; then as in a notebook, or typed into Python."""
    pipe = tp.Pipeline(two_layers, cuts=[1], device="cpu")
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "here/mine.py", raising=False)
    with pytest.raises(
        ConfigError, match=r"needs 2 processes; start it with `thinpipe run mine\.py`"
    ):
        tp.Run("runs/a", pipe)
    with pytest.raises(ConfigError, match=r"pipeline is a int; give it a thinpipe\.Pipeline"):
        tp.Run("runs/a", 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"returned list, not a module; return an nn\.Sequential"):
        tp.Pipeline(list)  # type: ignore[arg-type]
    monkeypatch.delattr(main, "__file__")
    with pytest.raises(ConfigError, match="needs 2 processes; write the program to a file") as said:
        tp.Run("runs/a", pipe)
    assert "%%writefile mine.py" in str(said.value)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
