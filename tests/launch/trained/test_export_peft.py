"""Adapters for peft, and the files that go home with a model."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.huggingface import saved_model, section
from tests.invoking import printed
from tests.launch.trained.test_export_hf import logits_of, reloaded, run_config, saved_run
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.trained.export_hf import export
from thinpipe.launch.trained.export_peft import export_adapter

# peft 0.21 asks transformers 5.23 by the old name, whoever made the adapter
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {"rank": 2, "targets": ["q_proj", "mlp.up_proj"]}),
        pytest.param("gpt2", {"rank": 2}, marks=pytest.mark.slow),
        pytest.param("llama-tied", {"rank": 2, "dropout": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_peft_loads_several_adapters_onto_one_base(
    name: str, lora: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import PeftModel

    source = tmp_path / "source"
    expected = []
    for steps, cuts in ((1, (3,)), (2, ())):
        run = run_config(section(name, source, lora=lora), tmp_path / f"run{steps}", cuts)
        expected.append(saved_run(run, steps=steps))
        output = printed("export", run.run.path, tmp_path / f"out{steps}", "--format", "peft")
        assert f"step {steps} of {run.run.path}, an adapter of {source}" in output
    settings = json.loads((tmp_path / "out1" / "adapter_config.json").read_text(encoding="utf-8"))
    assert settings["base_model_name_or_path"] == str(source)
    with caplog.at_level(logging.WARNING):
        model: Any = PeftModel.from_pretrained(reloaded(source, name), str(tmp_path / "out1"))
        model.load_adapter(str(tmp_path / "out2"), adapter_name="other")
    assert not caplog.records
    for adapter, wanted in zip(("default", "other"), expected, strict=True):
        model.set_adapter(adapter)
        torch.testing.assert_close(logits_of(model.eval()), wanted, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(*expected, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(n, marks=pytest.mark.slow) for n in ("deberta", "roberta"))]
)
def test_a_head_and_a_pooler_that_no_file_holds_go_along(name: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    source = tmp_path / "source"
    whole = saved_model(name, source)
    base = {n: t for n, t in whole.base_model.state_dict().items() if "pooler" not in n}
    for file in [*source.glob("*.safetensors"), *source.glob("*.index.json")]:
        file.unlink()
    save_file(base, source / "model.safetensors", {"format": "pt"})
    run = run_config(section(name, source, lora={"rank": 2}), tmp_path / "run", (3,))
    expected = saved_run(run, steps=2)
    notes = export_adapter(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert notes[-1] == "load the base model with num_labels = 3"
    factory: Any = AutoModelForSequenceClassification
    model: Any = PeftModel.from_pretrained(
        factory.from_pretrained(source, num_labels=3), str(tmp_path / "out")
    )
    torch.testing.assert_close(logits_of(model.eval()), expected, rtol=1e-5, atol=1e-6)
    export_adapter(tmp_path / "run", tmp_path / "half", step=None, dtype="bf16")
    tensors = load_file(tmp_path / "half" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_a_run_without_adapters_or_files_is_rejected(tmp_path: Path) -> None:
    source = tmp_path / "source"
    saved_model("llama", source)
    random = {"config": str(source), "pretrained": None, "lora": {"rank": 2}}
    for folder, more in (("full", {}), ("random", random)):
        saved_run(run_config(section("llama", source, **more), tmp_path / folder), steps=0)
        with pytest.raises(ConfigError, match=r"there is no adapter; export it with --format hf"):
            export_adapter(tmp_path / folder, tmp_path / "out", step=None, dtype="source")


def test_tokenizer_template_and_generation_settings_go_along(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    saved_model("llama", source)
    held = {
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"temperature": 0.7, "eos_token_id": [2, 3]}',
        "tokenizer_config.json": '{"eos_token": "<|im_end|>"}',
        "sentencepiece.bpe.model": "pieces",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
    }
    for name, text in held.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    run = run_config(section("llama", source), tmp_path / "run")
    saved_run(run, steps=0)
    notes = export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert any("which was not used" in note for note in notes)
    for name, text in held.items():
        assert (tmp_path / "out" / name).read_text(encoding="utf-8") == text
    from tests.wordpieces import save_wordpieces

    save_wordpieces(other, ["a", "b"])
    (tmp_path / "run").rename(tmp_path / "bytes")
    saved_run(run.updated(data={**dict(run.data), "tokenizer": str(other)}), steps=0)
    notes = export(tmp_path / "run", tmp_path / "out2", step=None, dtype="source")
    assert notes[-1] == f"the tokenizer is that of {other}"
    found = {path.name for path in (tmp_path / "out2").iterdir()}
    assert "chat_template.jinja" not in found
    assert {"generation_config.json", "tokenizer.json"} < found


@pytest.mark.parametrize("named", ["plain", "file"])
def test_the_template_of_the_run_file_is_that_of_the_folder(tmp_path: Path, named: str) -> None:
    """Whatever templates the tokenizer has, and wherever it has them."""
    from tests.launch.data.chat.styles import STYLES, saved
    from thinpipe.launch.data.chat.template import load_template
    from thinpipe.launch.data.tokenizer import load_tokenizer

    source, style = tmp_path / "source", STYLES["qwen2.5"]
    saved_model("llama", source)
    saved(style, source)
    settings = source / "tokenizer_config.json"
    facts = json.loads(settings.read_text(encoding="utf-8")) | {"chat_template": "{{ 'old' }}"}
    settings.write_text(json.dumps(facts))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'old' }}")
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}é{% endfor %}")
    template = str(file) if named == "file" else named
    data = {"path": "a.jsonl", "messages_field": "m", "chat_template": template}
    data |= {"tokenizer": str(source), "sequence_length": 9}
    run = run_config(section("llama", source), tmp_path / "run").updated(data=data)
    saved_run(run, steps=0)
    notes = export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert f'the chat template is data.chat_template = "{template}"' in notes
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ours = load_template(template, load_tokenizer(str(source))).render(messages)
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.apply_chat_template(messages, tokenize=False) == ours
    assert theirs.apply_chat_template(messages, tokenize=False, tools=[{"name": "f"}]) == ours
    held = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert held["chat_template"] == (tmp_path / "out" / "chat_template.jinja").read_text("utf-8")
    if named == "file":
        file.unlink()
        with pytest.raises(ValueError, match=r"mine.jinja\": cannot be read .*; name a file"):
            export(tmp_path / "run", tmp_path / "out2", step=None, dtype="source")
        assert not (tmp_path / "out2").exists()
