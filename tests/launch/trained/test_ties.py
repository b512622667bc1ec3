"""Which weights a tied model starts from, and what an export of it holds."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.single_process import in_process
from tests.huggingface import LAYERS, saved_model, section
from tests.launch.trained.test_export_hf import (
    assert_same_bytes,
    logits,
    logits_of,
    run_config,
    saved_run,
    stored,
    transformers_logits,
)
from thinpipe.launch.checkpoint.manifest import CheckpointError
from thinpipe.launch.trained.export_hf import export
from thinpipe.launch.trained.model import load, start_from_run
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.self_check import check_step

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Change = Callable[[dict[str, Any]], None]


def changed(folder: Path, change: Change, **settings: Any) -> None:
    """A tied Qwen2 in one file, after `change` of its tensors."""
    whole = saved_model("qwen2", folder, tie_word_embeddings=True, **settings)
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    tensors = {name: t.clone() for name, t in whole.state_dict().items() if name != HEAD}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def own_head(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous()


def equal_head(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def head_alone(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def nbytes(folder: Path) -> int:
    return sum(t.nbytes for file in stored(folder).values() for t in file.values())


@pytest.mark.parametrize("cuts", [pytest.param((), marks=pytest.mark.slow), (2, 4)])
def test_a_head_of_its_own_is_used_though_the_config_says_tied(
    cuts: tuple[int, ...], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    changed(source, own_head)
    run = run_config(section("qwen2", source), tmp_path / "run", cuts)
    trained = saved_run(run, steps=0)
    torch.testing.assert_close(transformers_logits(source, "qwen2"), trained)
    config: Any = run.model
    assert config.own_heads == [HEAD]
    assert not config.could_be_tied
    said = f"note: {HEAD} in the files of model.pretrained differs"
    assert any(note.startswith(said) for note in run.notices())
    check_step(config)
    notes = export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert f"{HEAD}: differs from the embedding, so saved untied" in notes
    facts = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert facts["tie_word_embeddings"] is False
    for file, tensors in stored(source).items():
        for name, tensor in tensors.items():
            assert torch.equal(stored(tmp_path / "out")[file][name], tensor)
    torch.testing.assert_close(transformers_logits(tmp_path / "out", "qwen2"), trained)
    torch.testing.assert_close(logits_of(load(tmp_path / "run")), trained)


def test_an_exact_tie_of_unlike_copies_is_rejected(tmp_path: Path) -> None:
    changed(tmp_path, own_head)
    message = rf'"exact": the head .* no copy of its embedding \({HEAD} of its files differs\)'
    with pytest.raises(ValueError, match=message):
        HuggingFaceConfig(**section("qwen2", tmp_path, tie_embeddings="exact"))


@pytest.mark.parametrize(
    ("change", "cuts"),
    [
        (equal_head, (3,)),
        (head_alone, ()),
        pytest.param(equal_head, (), marks=pytest.mark.slow),
        pytest.param(head_alone, (3,), marks=pytest.mark.slow),
    ],
)
def test_files_may_hold_either_copy_of_a_tied_weight_or_both(
    change: Change, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    changed(source, change)
    run = run_config(section("qwen2", source, tie_embeddings="exact"), tmp_path / "run", cuts)
    trained = saved_run(run, steps=0)
    torch.testing.assert_close(transformers_logits(source, "qwen2"), trained)
    export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    assert_same_bytes(tmp_path / "out", source)


@pytest.mark.parametrize(
    ("cuts", "more", "tied"),
    [
        pytest.param((), {}, True, marks=pytest.mark.slow),
        pytest.param((3,), {"tie_embeddings": "exact"}, True, marks=pytest.mark.slow),
        ((3,), {"lora": {"rank": 2}}, True),
        pytest.param((3,), {}, False, marks=pytest.mark.slow),
    ],
)
def test_an_export_is_as_large_as_its_source_unless_copies_differ(
    cuts: tuple[int, ...],
    more: dict[str, Any],
    tied: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    saved_model("llama-tied", source, dtype="bfloat16")
    for file in source.glob("*.safetensors"):
        save_file({k: t.bfloat16() for k, t in load_file(file).items()}, file, {"format": "pt"})
    run = run_config(section("llama", source, **more), tmp_path / "run", cuts)
    trained = saved_run(run, steps=2)
    notes = export(tmp_path / "run", out, step=None, dtype="source")
    said = f"{HEAD}: one weight with {EMBEDDING}, saved once" in notes
    assert said == tied == (not any("saved untied" in note for note in notes))
    embedding = load(tmp_path / "run").get_input_embeddings().weight
    assert nbytes(out) == nbytes(source) + (0 if tied else 2 * embedding.numel())
    facts, before = (
        json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (out, source)
    )
    assert facts == {**before, "tie_word_embeddings": tied}
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").addHandler(caplog.handler)
        found = transformers_logits(out, "llama")
        logging.getLogger("transformers").removeHandler(caplog.handler)
    torch.testing.assert_close(found.float(), trained, atol=0.05, rtol=0.05)
    assert not caplog.records


def test_a_run_keeps_no_tie_of_copies_that_another_trained_apart(tmp_path: Path) -> None:
    source = tmp_path / "source"
    saved_model("llama-tied", source)
    saved_run(run_config(section("llama", source), tmp_path / "old", (3,)), steps=2)
    exact = {"tie_embeddings": "exact", "from_run": str(tmp_path / "old")}
    new = run_config(section("llama", source, **exact), tmp_path / "new", (3,))
    with (
        in_process(new, total_steps=9) as built,
        pytest.raises(CheckpointError, match=r"embed_tokens.* were trained as separate weights"),
    ):
        start_from_run(built, new)
    apart = run_config(section("llama", source, from_run=str(tmp_path / "old")), tmp_path / "new")
    with in_process(apart, total_steps=9) as built:
        start_from_run(built, apart)
        assert logits(built).shape[-1] > LAYERS
