import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.single_process import in_process
from tests.huggingface import ENCODERS, LAYERS, VOCAB, saved_model, section
from tests.invoking import printed
from tests.often import mostly_slow
from tests.training import checkpoints, config
from thinpipe.launch.checkpoint import files as checkpoint
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig, write_config
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.trained.export_hf import export
from thinpipe.pipeline.batch import Batch, Samples

TOKENS = 9
WEIGHTS = ("pretrained", "config")


def batch(step: int, *, classes: int | None) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs_BT = torch.randint(5, VOCAB, (4, TOKENS), generator=generator)
    targets = inputs_BT if classes is None else torch.randint(classes, (4,), generator=generator)
    mask_BT = torch.ones(4, TOKENS, dtype=torch.int64)
    mask_BT[1, 6:] = 0
    return Batch(inputs_BT, targets, torch.arange(4 * step, 4 * step + 4), mask_BT)


def run_config(model: dict[str, Any], folder: Path, cuts: tuple[int, ...] = (2, 4)) -> RunConfig:
    labels = {"text_field": "text", "label_field": "label"} if "classes" in model else {}
    data = {"sequence_length": TOKENS, **labels}
    return config(model=model, run={"folder": str(folder)}, data=data, pipeline={"cuts": cuts})


def saved_run(run: RunConfig, *, steps: int) -> Tensor:
    """Train, save as a run does, and return the pipeline's logits of a padded batch."""
    with in_process(run, total_steps=10) as built:
        for step in range(steps):
            built.engine.train_step(batch(step, classes=run.model.classes), step)
        checkpoints(run, built).save(steps)
        write_config(run, run.run.path / "config.toml")
        return logits(built)


def logits(built: Built) -> Tensor:
    whole = batch(99, classes=None)
    x: Tensor = whole.inputs_BT
    with torch.no_grad():
        for stage in built.stages:
            module: Any = stage.submod
            x = module.eval()(x, Samples(whole.ids_B, whole.mask_BT))
    return x


def reloaded(folder: Path, name: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    factory: Any = AutoModelForSequenceClassification if name in ENCODERS else AutoModelForCausalLM
    return factory.from_pretrained(folder).eval()


def logits_of(model: Any) -> Tensor:
    whole = batch(99, classes=None)
    with torch.no_grad():
        found: Tensor = model(input_ids=whole.inputs_BT, attention_mask=whole.mask_BT).logits
    return found


def transformers_logits(folder: Path, name: str) -> Tensor:
    return logits_of(reloaded(folder, name))


def stored(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: load_file(path) for path in folder.glob("*.safetensors")}


def assert_same_bytes(left: Path, right: Path) -> None:
    ours, theirs = stored(left), stored(right)
    assert ours.keys() == theirs.keys()
    for file, tensors in ours.items():
        assert tensors.keys() == theirs[file].keys()
        for name, tensor in tensors.items():
            other = theirs[file][name]
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name
    assert (left / "config.json").read_bytes() == (right / "config.json").read_bytes()


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [
            *("gpt2", "gpt-neox", "llama", "gemma", "opt-350m", "bert", "deberta", "mixtral"),
            *("qwen3-moe", "deepseek-v3", "qwen3-next", "falcon"),
        ],
        {"gpt2", "deberta", "mixtral"}.__contains__,
    ),
)
def test_export_without_training_is_byte_identical(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    saved_model(name, source)
    (source / "merges.txt").write_text("#version: 0.2\n")
    saved_run(run_config(section(name, source), tmp_path / "run"), steps=0)
    export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert_same_bytes(tmp_path / "out", source)
    assert (tmp_path / "out" / "merges.txt").read_text(encoding="utf-8") == "#version: 0.2\n"


def test_export_keeps_the_source_dtype(tmp_path: Path) -> None:
    source = tmp_path / "source"
    saved_model("llama", source, dtype="bfloat16")
    for path in source.glob("*.safetensors"):
        save_file({k: t.bfloat16() for k, t in load_file(path).items()}, path, {"format": "pt"})
    saved_run(run_config(section("llama", source), tmp_path / "run"), steps=0)
    export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert_same_bytes(tmp_path / "out", source)
    export(tmp_path / "run", tmp_path / "wide", step=None, dtype="fp32")
    assert next(reloaded(tmp_path / "wide", "llama").parameters()).dtype == torch.float32


def test_a_weight_that_the_dtype_cannot_hold_is_rejected(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    saved_model("gpt2", source)
    for path, tensors in stored(source).items():
        for name in (name for name in tensors if name.endswith("h.0.ln_1.bias")):
            tensors[name][3] = 1e5
        save_file(tensors, source / path, {"format": "pt"})
    saved_run(run_config(section("gpt2", source), run), steps=0)
    for path, tensors in stored(source).items():
        save_file({k: t.half() for k, t in tensors.items()}, source / path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"ln_1\.bias: holds 1e\+05, .*float16 .*--dtype bf16"):
        export(run, tmp_path / "out", step=None, dtype="source")
    assert not list(tmp_path.glob(".*"))
    export(run, tmp_path / "out", step=None, dtype="bf16")
    held = reloaded(tmp_path / "out", "gpt2").transformer.h[0].ln_1.bias
    assert held.max() == torch.tensor(1e5).bfloat16()


def test_an_empty_folder_may_be_named_by_a_link_or_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(run_config(section("gpt2", tmp_path / "source"), tmp_path / "run"), steps=0)
    for name in ("out", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("out")
    export(tmp_path / "run", tmp_path / "link", step=None, dtype="source")
    assert_same_bytes(tmp_path / "out", tmp_path / "source")
    monkeypatch.chdir(tmp_path / "here")
    export(tmp_path / "run", Path(), step=None, dtype="source")
    assert_same_bytes(tmp_path / "here", tmp_path / "source")


def test_a_head_that_differs_from_the_embedding_is_saved_untied(tmp_path: Path) -> None:
    """In the dtype that it had as a copy."""
    source = tmp_path / "source"
    saved_model("gpt2", source)
    for path in source.glob("*.safetensors"):
        save_file({k: t.half() for k, t in load_file(path).items()}, path, {"format": "pt"})
    saved_run(run_config(section("gpt2", source), tmp_path / "run"), steps=1)
    notes = export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert any("lm_head.weight: differs from" in note for note in notes)
    facts = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert facts["tie_word_embeddings"] is False
    tensors = {name: t for file in stored(tmp_path / "out").values() for name, t in file.items()}
    assert not torch.equal(tensors["lm_head.weight"], tensors["transformer.wte.weight"])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [*product(["gpt2", "gpt-neox", "llama-tied", "roberta", "mixtral"], WEIGHTS)],
        {("mixtral", "pretrained"), ("gpt2", "config")}.__contains__,
    ),
    ids="-".join,
)
def test_transformers_computes_the_logits_of_the_trained_pipeline(
    case: tuple[str, str], tmp_path: Path
) -> None:
    name, weights = case
    model = section(name, tmp_path / "source")
    model[weights] = model.pop("pretrained")
    run = run_config(model, tmp_path / "run")
    trained = saved_run(run, steps=2)
    export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    torch.testing.assert_close(transformers_logits(tmp_path / "out", name), trained)
    before = transformers_logits(tmp_path / "source", name)
    assert not torch.allclose(before, trained, atol=1e-3)


def test_an_exact_tie_stays_one_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On unlike processors its two copies come to differ in their last bits."""
    model = section("gpt2", tmp_path / "source", tie_embeddings="exact")
    saved_run(run_config(model, tmp_path / "run"), steps=2)
    read_part = checkpoint.read_part

    def rounded_apart(*args: Any) -> Any:
        state = read_part(*args)
        for weights in state["model"].values():
            if "model.lm_head.weight" in weights:
                weights["model.lm_head.weight"] = weights["model.lm_head.weight"] * (1 + 2e-7)
        return state

    monkeypatch.setattr(checkpoint, "read_part", rounded_apart)
    notes = export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert not any("untied" in note for note in notes), notes
    left = reloaded(tmp_path / "out", "gpt2")
    assert left.config.tie_word_embeddings


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["gpt2", "llama"], "gpt2".__eq__))
def test_lora_is_merged(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = section(name, source, lora={"rank": 2})
    for steps in (0, 3):
        run = run_config(model, tmp_path / f"run{steps}")
        trained = saved_run(run, steps=steps)
        export(run.run.path, tmp_path / f"out{steps}", step=None, dtype="source")
        answer = transformers_logits(tmp_path / f"out{steps}", name)
        torch.testing.assert_close(answer, trained, atol=1e-5, rtol=1e-5)
    assert_same_bytes(tmp_path / "out0", source)
    changed = {
        key
        for file, tensors in stored(tmp_path / "out3").items()
        for key, tensor in tensors.items()
        if not torch.equal(tensor, stored(source)[file][key])
    }
    targets = ("c_attn",) if name == "gpt2" else ("q_proj", "v_proj")
    assert len(changed) == LAYERS * len(targets)
    assert all(key.endswith(tuple(f"{target}.weight" for target in targets)) for key in changed)


def test_tensors_of_other_heads_are_left_out_with_a_note(tmp_path: Path) -> None:
    source = tmp_path / "source"
    saved_model("bert", source)
    path = min(source.glob("*.safetensors"))
    index = source / "model.safetensors.index.json"
    listed = json.loads(index.read_text(encoding="utf-8"))
    save_file({**load_file(path), "cls.bias": torch.zeros(2)}, path, {"format": "pt"})
    listed["weight_map"]["cls.bias"] = path.name
    index.write_text(json.dumps(listed))
    saved_run(run_config(section("bert", source), tmp_path / "run"), steps=0)
    notes = export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert "not part of this model, left out: cls.bias" in notes


def test_the_command_exports_and_rejects_what_it_cannot(tmp_path: Path) -> None:
    source, run, out = tmp_path / "source", tmp_path / "run", tmp_path / "out"
    saved_run(run_config(section("gpt2", source), run), steps=1)
    assert f"{out}: step 1 of {run}" in printed("export", run, out)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export(run, out, step=None, dtype="source")
    shutil.rmtree(out)
    with pytest.raises(ValueError, match=r"step-7.*missing"):
        export(run, out, step=7, dtype="source")
    (run / "checkpoints" / "step-1" / "replica-0.rank-0.safetensors").unlink()
    with pytest.raises(ValueError, match=r"rank-0\.safetensors are not here; copy that folder"):
        export(run, out, step=None, dtype="source")
    (source / "config.json").write_text((source / "config.json").read_text(encoding="utf-8") + " ")
    with pytest.raises(ValueError, match=r"config\.json .*changed since"):
        export(run, out, step=None, dtype="source")
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("run", "out"), [("file", "out"), ("run", "file"), ("run", "file/out")])
def test_a_file_in_place_of_a_folder_is_rejected(tmp_path: Path, run: str, out: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"^(RUN_FOLDER|OUT) = .* is a file; name another folder"):
        export(tmp_path / run, tmp_path / out, step=None, dtype="source")
