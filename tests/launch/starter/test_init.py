"""`thinpipe init`: the file that it writes starts as it stands."""

import json
import os
from pathlib import Path

import pytest

from tests.commands import run
from tests.huggingface import saved_model
from tests.invoking import invoke, printed
from tests.launch.data.chat.styles import STYLES, saved
from tests.ports import free_port
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.view.report.metrics import read_metrics

MODULE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(30, 16), *[nn.Linear(16, 16) for _ in range(3)],
                         nn.Linear(16, 30))

class Texts(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i): return torch.arange(i, i + 8) % 30, torch.arange(i + 1, i + 9) % 30

training = Texts
"""
ROWS = [{"instruction": f"{n} + 1 =", "output": str(n + 1), "id": n} for n in range(400)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(700)))
    Path("little.txt").write_text(Path("book.txt").read_text(encoding="utf-8")[:3000])
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    Path("mine_init.py").write_text(MODULE)
    return tmp_path


def init(*words: str, code: int = 0) -> str:
    return printed("init", *words, code=code)


def written(*words: str) -> RunConfig:
    assert "written: new.toml; start it with `thinpipe train new.toml`" in init("new.toml", *words)
    return load_config(Path("new.toml"))


@pytest.mark.dist
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--data", "little.txt"), marks=pytest.mark.slow),
        ("--model", "mine_init:model", "--data", "mine_init:training", "--stages", "2"),
    ],
)
def test_what_it_writes_starts_as_it_stands(folder: Path, words: tuple[str, ...]) -> None:
    config = written(*words)
    assert len(config.pipeline.cuts) >= 1 or config.pipeline.auto_cuts
    run("train", "new.toml")
    records = read_metrics(folder / "runs/new/metrics.jsonl")
    assert records[-1].loss < records[0].loss


def test_it_finds_out_how_long_and_how_many_samples_there_are(folder: Path) -> None:
    config = written("--data", "book.txt", "--stages", "3")
    assert (config.data.path, config.data.train_sequences) == ("book.txt", "all")
    assert (config.data.sequence_length, config.data.eval_sequences) == (128, 8)
    assert config.pipeline.cuts == (3, 5)
    assert config.boundary_at(3).forward.kind == "aqsgd"
    Path("short.txt").write_text("a short text, of some bytes only: enough for a test of it\n" * 3)
    init("short.toml", "--data", "short.txt")
    short = load_config(Path("short.toml"))
    assert short.data.sequence_length == 16
    assert short.train.batch_size < 16


def test_it_finds_out_the_fields_of_rows(folder: Path) -> None:
    config = written("--data", "rows.jsonl")
    assert (config.data.prompt_field, config.data.response_field) == ("instruction", "output")
    assert config.data.chat_template == "plain"
    Path("rows.jsonl").write_text('{"body": "a"}\n')
    message = init("other.toml", "--data", "rows.jsonl", code=2)
    assert "has the fields body, none of which is known as text or messages" in message
    assert not Path("other.toml").exists()


def test_it_finds_conversations_and_writes_how_they_are_learnt(folder: Path) -> None:
    said = [{"from": "human", "value": "A question."}, {"from": "gpt", "value": "An answer. " * 9}]
    Path("talk.jsonl").write_text(f"{json.dumps({'id': 1, 'conversations': said})}\n" * 99)
    config = written("--data", "talk.jsonl")
    assert (config.data.messages_field, config.data.loss_on) == ("conversations", "assistant")
    assert config.data.chat_template == "plain"
    assert (config.data.sequence_length, getattr(config.model, "context", 0)) == (256, 256)
    Path("new.toml").unlink()
    rows = [{"instruction": "Add.", "input": f"{n} + 1", "output": str(n + 1)} for n in range(99)]
    Path("alpaca.json").write_text(json.dumps(rows))
    alpaca = written("--data", "alpaca.json").data
    assert (alpaca.prompt_field, alpaca.response_field) == (("instruction", "input"), "output")
    assert alpaca.chat_template == "plain"


@pytest.mark.slow
def test_the_template_of_a_models_tokenizer_is_used(folder: Path) -> None:
    place = folder / "gpt2"
    saved_model("gpt2", place, vocab_size=512, n_positions=128)
    saved(STYLES["chatml"], place)
    Path("talk.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
        * 99
    )
    Path("pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 99)
    for data in ("talk.jsonl", "pairs.jsonl"):
        config = written("--data", data, "--model", str(place), "--stages", "2")
        assert config.data.chat_template == "tokenizer"
        assert config.data.tokenizer == str(place)
        Path("new.toml").unlink()


@pytest.mark.parametrize("weights", [True, False])
def test_it_finds_out_what_a_model_of_hugging_face_brings(folder: Path, *, weights: bool) -> None:
    place = folder / "gpt2"
    saved_model("gpt2", place, vocab_size=256)
    if not weights:
        for file in place.glob("*.safetensors"):
            file.unlink()
    said = init("new.toml", "--data", "book.txt", "--model", str(place), "--stages", "2")
    assert f"note: {place} has no tokenizer (tokenizer.json): text is cut into bytes" in said
    config = load_config(Path("new.toml"))
    assert getattr(config.model, "pretrained" if weights else "config") == str(place)
    assert config.train.lr == (5e-5 if weights else 1e-3)
    assert ("random ones are trained" in Path("new.toml").read_text(encoding="utf-8")) != weights
    assert len(config.pipeline.cuts) == 1


def test_nothing_is_overwritten_and_nothing_is_left_behind(folder: Path) -> None:
    Path("run.toml").write_text("mine")
    before = sorted(os.listdir())
    for words, message in (
        ((), "run.toml: exists already; name a new file, or edit this one"),
        (("new.txt",), "new.txt: name a file that ends in .toml"),
        (("new.toml", "--data", "gone.txt"), "--data = 'gone.txt': no such file or folder"),
        (("new.toml", "--model", "gone"), "--model = gone: neither a folder with config.json nor"),
        (("new.toml", "--model", "mine_init:model"), "takes samples of your own, and no other do"),
        (
            ("new.toml", "--model", "mine_init:modell", "--data", "mine_init:training"),
            '--model = "mine_init:modell": mine_init has no modell',
        ),
    ):
        assert message in init(*words, code=2)
    assert [name for name in sorted(os.listdir()) if name != "__pycache__"] == before
    assert Path("run.toml").read_text(encoding="utf-8") == "mine"


def test_doctor_takes_a_model_of_ones_own(folder: Path) -> None:
    words = ("--model", "mine_init:model", "--data", "mine_init:training", "--stages", "2")
    init("new.toml", *words)
    alone = ["doctor", "new.toml", "--rdzv", f"127.0.0.1:{free_port()}"]
    _, shown = invoke(*alone, "--set", "pipeline.device=cpu")
    assert "of activations" in shown, shown


def test_what_cannot_be_cut_as_wished_is_not_written(folder: Path) -> None:
    tied = f"{MODULE}\ndef tied():\n    m = model()\n    m[4].weight = m[0].weight\n    return m\n"
    Path("mine_tied.py").write_text(tied)
    words = ("--model", "mine_tied:tied", "--data", "mine_tied:training", "--stages", "2")
    said = init("new.toml", *words, code=2)
    assert "can be cut in 0 places only, as 0.weight and 4.weight are one parameter" in said
    assert not Path("new.toml").exists()


def test_a_file_is_written_although_this_machine_has_no_room_now(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinpipe.launch.memory.rows.free_memory", lambda: 10**6)
    output = init("new.toml", "--data", "book.txt")
    assert "note: it cannot start here now: " in output
    assert "1.00 MB" in output
    assert load_config(Path("new.toml")).data.path is not None


def test_a_damaged_first_row_is_passed_over_and_damage_alone_is_named(tmp_path: Path) -> None:
    from thinpipe.launch.config.toml import ConfigError
    from thinpipe.launch.starter.draft import Draft, _look_at_data

    data, found = tmp_path / "a.jsonl", Draft()
    data.write_text('{"text": \n{"text": "a"}\n')
    _look_at_data(found, str(data))
    assert found.data["text_field"] == "text"
    data.write_text('{"text": \n')
    with pytest.raises(ConfigError, match=r"a.jsonl:1: not JSON .*; correct it"):
        _look_at_data(Draft(), str(data))
