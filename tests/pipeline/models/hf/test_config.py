import json
from pathlib import Path
from typing import Any

import pytest

from tests.huggingface import CLASSES, LAYERS, saved_model, section, settings
from thinpipe.launch.config.run import RunConfig, load_config, write_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    saved_model("gpt2", folder)
    return folder


def run_file(folder: Path, model: str, more: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(f"[model]\n{model}\n[data]\nsequence_length = 16\n{more}")
    return path


def test_shape_and_tokenizer_come_from_the_folder(gpt2: Path, tmp_path: Path) -> None:
    run = load_config(run_file(tmp_path, f'pretrained = "{gpt2}"', 'tokenizer = "model"'))
    assert run.data.tokenizer == str(gpt2)
    model = run.model
    assert isinstance(model, HuggingFaceConfig)
    assert (model.layers, model.width, model.vocab, model.context) == (LAYERS, 32, 256, 32)
    assert model.ties_embeddings


@pytest.mark.parametrize("name", ["roberta", "bert", "gptj", "gpt-neo"])
def test_the_longest_sequence_is_what_positions_allow(name: str, tmp_path: Path) -> None:
    settings(name).save_pretrained(tmp_path)
    assert HuggingFaceConfig(**section(name, tmp_path, config=str(tmp_path))).context == 32


def test_a_relative_folder_is_resolved_and_the_written_config_reads_back_equal(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gpt2.parent)
    run = load_config(run_file(tmp_path, f'pretrained = "{gpt2.name}"\nlora = {{ rank = 4 }}'))
    write_config(run, tmp_path / "written.toml")
    monkeypatch.chdir(tmp_path)
    assert load_config(tmp_path / "written.toml") == run


def test_peers_compare_what_the_folder_holds_not_where_it_is(gpt2: Path, tmp_path: Path) -> None:
    def shared(folder: Path) -> dict[str, Any]:
        return RunConfig.model_validate(
            {"model": {"pretrained": str(folder)}, "data": {"sequence_length": 16}}
        ).shared()

    saved_model("gpt2", tmp_path)
    assert shared(gpt2) == shared(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "resid_pdrop": 0.5}))
    assert shared(gpt2) != shared(tmp_path)


@pytest.mark.parametrize(
    ("model", "more", "parts"),
    [
        ('pretrained = "gpt2-xl"', "", ["gpt2-xl", "no such folder", "hf download"]),
        ('pretrained = "{gpt2}"\nlayers = 3', "", ["model.layers: unknown key"]),
        ('pretrained = "{gpt2}"\nlora = {{ ranks = 3 }}', "", ['did you mean "rank"']),
        ('pretrained = "{gpt2}"', "[pipeline]\ncuts = [6]", ["6 is not between two", "1 to 5"]),
        ('pretrained = "{gpt2}"\ntask = "classification"', "", ["gpt2", "task = 'language'"]),
        ('pretrained = "{gpt2}"\nclasses = 2', "", ["classes = 2", "classification head"]),
        (
            'pretrained = "{mistral}"',
            'path = "x.jsonl"\nprompt_field = "p"\nresponse_field = "r"',
            ["data.packing = true", 'objective = "causal"', "sliding_window = 4", "at most 4"],
        ),
        ("layers = 2", 'tokenizer = "model"', ["only a model from a folder"]),
        ('pretrained = "{empty}"', "", ["holds no config.json"]),
    ],
)
def test_an_error_is_named_with_its_remedy(
    gpt2: Path, tmp_path: Path, model: str, more: str, parts: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    saved_model("mistral", tmp_path / "mistral")
    text = model.format(gpt2=gpt2, empty=tmp_path / "empty", mistral=tmp_path / "mistral")
    with pytest.raises(ConfigError) as caught:
        load_config(run_file(tmp_path, text, more))
    for part in parts:
        assert part in str(caught.value)


def test_a_sequence_longer_than_the_positions_is_rejected(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sequence_length = 99 .*at most 32"):
        load_config(run_file(tmp_path, f'pretrained = "{gpt2}"'), ["data.sequence_length=99"])


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt9"}')
    with pytest.raises(ValueError, match=r"config\.json: .*gpt9"):
        HuggingFaceConfig(config=str(tmp_path))


def test_random_weights_are_announced_when_both_folders_are_given(gpt2: Path) -> None:
    model = HuggingFaceConfig(pretrained="nowhere", config=str(gpt2))
    assert model.weight_files is None
    (notice,) = model.notices(cut=False, ties=True, tokenizer="model")
    assert "model.pretrained is not read" in notice


def test_frozen_parts_are_announced(tmp_path: Path) -> None:
    model = HuggingFaceConfig(**section("deberta", tmp_path))
    assert model.classes == CLASSES
    assert "encoder.rel_embeddings" in model.notices(cut=True, ties=False, tokenizer="model")[0]
    assert model.notices(cut=False, ties=True, tokenizer="model") == []


def test_an_exact_tie_needs_a_tied_model(tmp_path: Path) -> None:
    saved_model("llama", tmp_path)
    with pytest.raises(ValueError, match=r'tie_embeddings = "exact".*no copy'):
        HuggingFaceConfig(pretrained=str(tmp_path), tie_embeddings="exact")


def test_the_notice_on_ties_and_dropout_follows_the_folder(gpt2: Path, tmp_path: Path) -> None:
    def notices(model: dict[str, Any]) -> str:
        run = {"pipeline": {"cuts": [2]}, "data": {"sequence_length": 16}, "model": model}
        return "\n".join(RunConfig.model_validate(run).notices())

    saved_model("llama", tmp_path, attention_dropout=0.2)
    assert "separate weights" in notices({"pretrained": str(gpt2)})
    assert "model.dropout" not in notices({"pretrained": str(gpt2)})
    assert "separate weights" not in notices({"pretrained": str(tmp_path)})
    assert "model.dropout = 0.2 with AQ-SGD" in notices({"pretrained": str(tmp_path)})
    assert "bytes" in notices({"pretrained": str(gpt2)})
