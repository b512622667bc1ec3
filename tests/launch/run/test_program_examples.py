"""The programs in `examples/programs`, as a user starts them.

All ranks of one start run them one after the other: a start takes longer than most of them.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import run
from tests.wordpieces import save_wordpieces
from thinpipe.launch.trained.model import load
from thinpipe.launch.view.report.metrics import StepRecord, read_metrics

pytestmark = pytest.mark.dist
EXAMPLES = Path(__file__).parents[3] / "examples" / "programs"
WORDS = [
    *("the", "sky", "grass", "snow", "night", "blue", "green", "white", "black", "is", "was"),
    *("film", "room", "host", "soup", "fine", "lovely", "warm", "kind"),
    *("poor", "dull", "cold", "rude", "plus", "minus"),
]
ALL = {
    "module": (),
    "dict_batch": (),
    "masks": (),
    "scheduler": (),
    "metric": (),
    "streaming": (),
    "early_stopping": (),
    "hf_lora": ("llama",),
    "classification": ("bert",),
    "adapters": ("llama", "minus"),
}
"""Names and arguments."""
FAST = ("dict_batch", "streaming", "scheduler")

TOUR = """
import json, runpy, sys
from pathlib import Path
from thinpipe.launch.run import program
from thinpipe.pipeline.models.own.functions import LOOKING

for name, arguments in json.loads(Path("tour.json").read_text()):
    sys.argv = [name, *arguments]
    runpy.run_path(name, run_name="__main__")  # ends here while it is only looked at
    runs = program._RUNNING.get()
    while runs:  # as at the program's end
        runs.pop().__exit__(None, None, None)
"""


def tour(folder: Path, *names: str) -> None:
    """Run some of them."""
    chosen = [(str(EXAMPLES / f"{name}.py"), ALL[name]) for name in names]
    (folder / "tour.json").write_text(json.dumps(chosen))
    (folder / "tour.py").write_text(TOUR)
    run("run", "tour.py")


def records(name: str) -> list[StepRecord]:
    return read_metrics(Path("runs") / name / "metrics.jsonl")


def save_models(folder: Path) -> None:
    """Tiny ones, as a hub would have them."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    words = [*WORDS, *map(str, range(12))]
    vocab = len(save_wordpieces(folder / "llama", words))
    save_wordpieces(folder / "bert", words)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **shape)).save_pretrained(folder / "llama")
    BertModel(BertConfig(vocab_size=vocab, **shape)).save_pretrained(folder / "bert")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_a_test_of_every_one() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ALL)
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.slow
def test_batches_of_any_length_a_stream_and_a_scheduler(folder: Path) -> None:
    tour(folder, *FAST)
    lengths = [record.tokens for record in records("dict_batch")]
    assert len(lengths) == 12
    assert len(set(lengths)) > 1, "targets that do not count are no tokens"
    assert records("dict_batch")[-1].loss < 0.9 * records("dict_batch")[0].loss
    assert len(records("streaming")) == 10
    assert records("streaming")[-1].loss < records("streaming")[0].loss
    rates = [100 * record.lr for record in records("scheduler")]
    assert rates == pytest.approx([1, 0.962, 0.854, 0.691, 0.5, 0.309, 0.146, 0.038], abs=5e-4)
    assert [100 * record.own["rate"] for record in records("scheduler")] == rates


@pytest.mark.slow
def test_all_others(folder: Path) -> None:
    save_models(folder)
    tour(folder, *(name for name in ALL if name not in FAST))
    assert load_file("runs/module/model.safetensors")["blocks.3.norm2.bias"].shape == (32,)
    assert records("module")[-1].loss < records("module")[0].loss
    masks = [record.eval for record in records("masks") if record.eval]
    assert {"loss", "pearson", "loss_compressed", "pearson_compressed"} == set(masks[-1])
    metric = records("metric")[-1].eval
    assert metric is not None
    assert set(metric) == {"loss", "accuracy", "perplexity", "among_three", "Margin"}
    assert metric["among_three"] >= metric["accuracy"] > 1 / 60
    stopped = [record.eval["loss"] for record in records("early_stopping") if record.eval]
    best = stopped.index(min(stopped))
    assert len(stopped) == best + 3 < 20
    assert Path("runs/early_stopping/checkpoints/best").read_text() == f"step-{2 * best + 2}\n"
    assert load("runs/early_stopping", step="best")
    for name in ("hf_lora", "minus", "classification"):
        assert records(name)[-1].loss < records(name)[0].loss, name
    parts = list(Path("runs/minus/checkpoints").rglob("*.safetensors"))
    assert max(part.stat().st_size for part in parts) < 60_000, "adapters alone"
