"""How a family is cut, found by trying; and what is rejected."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.huggingface import LAYERS, TRIED, saved_model, section, settings
from thinpipe.pipeline.models.hf import families
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.families import Family, Substitute
from thinpipe.pipeline.models.hf.self_check import check_step
from thinpipe.pipeline.models.hf.stage import build_stage, check_folder

LAST_NORM: dict[str, Substitute] = {"ln_f": "identity"}
OPT_ENDS: dict[str, Substitute] = {
    "decoder.embed_tokens": "identity",
    "decoder.embed_positions": "zero",
    "decoder.project_in": "identity",
}


def config_of(kind: str, folder: Path, **values: Any) -> HuggingFaceConfig:
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **values).save_pretrained(folder)
    encoder = {"task": "classification", "classes": 2} if kind == "albert" else {}
    return HuggingFaceConfig(config=str(folder), **encoder)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gpt2", Family("h", {"wte": "identity", "wpe": "zero", "drop": "identity"}, LAST_NORM)),
        ("opt-350m", Family("decoder.layers", OPT_ENDS, {"decoder.project_out": "identity"})),
        ("bert", Family("encoder.layer", {"embeddings": "inputs"}, {"pooler": "none"})),
        ("llama", Family("layers", {"embed_tokens": "identity"}, {"norm": "identity"})),
    ],
)
def test_the_ends_are_found_by_the_order_of_calls(
    name: str, family: Family, tmp_path: Path
) -> None:
    settings(name).save_pretrained(tmp_path)
    found = HuggingFaceConfig(**section(name, tmp_path, config=str(tmp_path))).family
    assert (found.blocks, found.first, found.shared) == (family.blocks, family.first, ())
    assert found.last.items() >= family.last.items()


def test_a_family_is_found_where_a_program_builds_on_the_meta_device(tmp_path: Path) -> None:
    settings("llama").save_pretrained(tmp_path)
    with torch.device("meta"):
        found = HuggingFaceConfig(config=str(tmp_path)).family
    assert found == HuggingFaceConfig(config=str(tmp_path)).family


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        ("granite", {"embedding_multiplier": 3.0}, "hidden states change outside its blocks"),
        ("albert", {"num_attention_heads": 2}, "no list of 6 blocks"),
        ("mamba", {}, r"state-space or recurrent layers \(Mamba"),
    ],
)
def test_a_family_that_a_cut_would_change_is_rejected(
    kind: str, values: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 99}
    if kind == "granite":
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    config = config_of(kind, tmp_path, **shape, **values)
    with pytest.raises(ValueError, match=rf"'{kind}' cannot be cut: .*{problem}.*another family"):
        check_folder(config)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("t5", "encoder-decoder: its decoder needs"),
        ("vit", "neither a causal language model nor a text encoder"),
        ("llama4", "the text part of a multimodal model"),
    ],
)
def test_a_model_of_another_kind_is_rejected_by_the_run_file(
    kind: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"model_type = '{kind}'.*{problem}"):
        config_of(kind, tmp_path)


def test_a_router_s_loss_is_not_dropped_silently(tmp_path: Path) -> None:
    shape = TRIED["mixtral"][1]
    config_of("mixtral", tmp_path / "off", **shape, router_aux_loss_coef=0.01)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef = 0\.01: .*not computed; set"):
        config_of(
            "mixtral", tmp_path, **shape, router_aux_loss_coef=0.01, output_router_logits=True
        )


def test_the_self_check_finds_a_wrong_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Family("h", {"wte": "identity"}, LAST_NORM)
    monkeypatch.setitem(families.KNOWN, "gpt2", entry)
    saved_model("gpt2", tmp_path)
    config = HuggingFaceConfig(pretrained=str(tmp_path))
    with pytest.raises(ValueError, match=r"'gpt2', cut before layers \[2, 4\]: logits differs"):
        check_step(config)


@pytest.mark.parametrize("name", ["bert", "deepseek-v3"])
def test_the_self_check_passes_what_is_cut_right(name: str, tmp_path: Path) -> None:
    settings(name).save_pretrained(tmp_path)
    check_step(HuggingFaceConfig(**section(name, tmp_path, config=str(tmp_path))))


@pytest.mark.parametrize("name", ["apertus", "qwen3-next"])
def test_no_parameter_starts_unset(name: str, tmp_path: Path) -> None:
    settings(name).save_pretrained(tmp_path)
    config = HuggingFaceConfig(config=str(tmp_path))
    whole = build_stage(config, 0, LAYERS, seed=0, device="cpu").state_dict()
    stage = build_stage(config, 2, 4, seed=0, device="cpu").state_dict()
    assert all(tensor.isfinite().all() for tensor in whole.values())
    assert all(tensor.equal(whole[key]) for key, tensor in stage.items())


def test_a_parameter_that_nothing_sets_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaPreTrainedModel._init_weights

    def forgetful(self: Any, module: Any) -> None:
        if not isinstance(module, modeling_llama.LlamaRMSNorm):
            original(self, module)

    saved_model("llama", tmp_path)
    monkeypatch.setattr(modeling_llama.LlamaPreTrainedModel, "_init_weights", forgetful)
    with pytest.raises(ValueError, match=r"'llama'.*sets model\.norm\.weight; train from weights"):
        build_stage(HuggingFaceConfig(config=str(tmp_path)), 0, LAYERS, seed=0, device="cpu")
    build_stage(HuggingFaceConfig(pretrained=str(tmp_path)), 0, LAYERS, seed=0, device="cpu")
