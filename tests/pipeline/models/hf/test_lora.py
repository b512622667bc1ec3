import re
from pathlib import Path

import pytest
import torch

from tests.huggingface import CLASSES, LAYERS, saved_model, section
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig, LoraConfig
from thinpipe.pipeline.models.hf.lora import default_targets, merge_lora
from thinpipe.pipeline.models.hf.stage import build_stage, check_folder
from thinpipe.pipeline.models.torchgpipe_stage import LocalPipeline

CUTS = ((0, 2), (2, LAYERS))


def test_only_adapters_and_task_heads_are_trained(tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section("bert", tmp_path, lora={"rank": 2}))
    stages = [build_stage(config, *ends, seed=0, device="cpu") for ends in CUTS]
    parameters = [item for stage in stages for item in stage.model.named_parameters()]
    trained = {name for name, parameter in parameters if parameter.requires_grad}
    assert {"classifier.weight", "classifier.bias"} < trained
    adapters = trained - {"classifier.weight", "classifier.bias"}
    assert len(adapters) == LAYERS * 2 * 2  # query and value, A and B
    assert all(".lora_" in name for name in adapters)
    assert config.classes == CLASSES


def test_adapters_do_not_depend_on_the_cut_and_change_nothing_at_the_start(tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section("llama", tmp_path, lora={"rank": 2}))
    whole = build_stage(config, 0, LAYERS, seed=1, device="cpu").state_dict()
    before = torch.random.get_rng_state()
    for ends in CUTS:
        for name, tensor in build_stage(config, *ends, seed=1, device="cpu").state_dict().items():
            assert torch.equal(tensor, whole[name]), name
    assert torch.equal(before, torch.random.get_rng_state())
    name = "model.model.layers.3.self_attn.q_proj.lora_A.default.weight"
    other = build_stage(config, 2, LAYERS, seed=2, device="cpu").state_dict()
    assert whole[name].std() > 0
    assert not torch.equal(other[name], whole[name])
    assert not torch.any(whole[name.replace("lora_A", "lora_B")])


def test_what_files_hold_has_the_same_digests_wherever_it_is(tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section("bert", tmp_path, lora={"rank": 2}))
    whole = build_stage(config, 0, LAYERS, seed=1, device="cpu")
    assert set(whole.base) == {
        name
        for name, parameter in whole.named_parameters()
        if ".lora_" not in name and ".classifier." not in name and not parameter.requires_grad
    }
    parts: dict[str, str] = {}
    for first, stop in CUTS:
        parts |= build_stage(config, first, stop, seed=2, device="cpu").base
    assert parts == whole.base
    spread = LocalPipeline(
        lambda first, stop, device: build_stage(config, first, stop, seed=1, device=device),
        *(0, LAYERS),
        devices=[torch.device("cpu")] * 2,
    )
    assert spread.base == whole.base
    assert spread.state_dict().keys() == whole.state_dict().keys()
    plain = HuggingFaceConfig(**section("bert", tmp_path))
    assert not build_stage(plain, 0, 2, seed=1, device="cpu").base


@pytest.mark.parametrize("inputs_first", [False, True])
def test_merging_adds_the_scaled_product(inputs_first: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 5) if inputs_first else (5, 3)
    base, a_RI, b_OR = (torch.randn(s, generator=generator) for s in (shape, (2, 3), (5, 2)))
    tensors = {
        "q.base_layer.weight": base,
        "q.base_layer.bias": torch.ones(5),
        "q.lora_A.default.weight": a_RI,
        "q.lora_B.default.weight": b_OR,
        "norm.weight": torch.ones(3),
    }
    merged = merge_lora(tensors, LoraConfig(rank=2, alpha=6), inputs_first=inputs_first)
    assert merged.keys() == {"q.weight", "q.bias", "norm.weight"}
    change_OI = 3 * b_OR @ a_RI
    torch.testing.assert_close(
        merged["q.weight"], base + (change_OI.T if inputs_first else change_OI)
    )


@pytest.mark.parametrize("missing", ["q_proj", "ln_1", "lm_head"])
def test_a_target_that_is_not_there_is_named(tmp_path: Path, missing: str) -> None:
    targets = ["mlp.c_fc", missing]
    config = HuggingFaceConfig(**section("gpt2", tmp_path, lora={"targets": targets}))
    message = (
        f"model.lora.targets = {targets}: no linear layers of a block: ['{missing}']; "
        "use some of ['c_attn', 'c_proj', 'c_fc']"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check_folder(config)


def test_a_stage_without_any_target_is_rejected_with_our_message(tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section("gpt2", tmp_path, lora={"targets": ["q_proj"]}))
    with pytest.raises(ValueError, match=r"no linear layers of a block: \['q_proj'\]; use some of"):
        build_stage(config, 0, 2, seed=0, device="meta")


@pytest.mark.parametrize(("name", "expected"), [("phi3", ["qkv_proj"]), ("modernbert", ["Wqkv"])])
def test_a_family_that_peft_does_not_know_gets_its_attention_s_inputs(
    name: str, expected: list[str], tmp_path: Path
) -> None:
    config = HuggingFaceConfig(**section(name, tmp_path, lora={}))
    assert default_targets(config.whole()) == expected
    check_folder(config)


def test_a_family_without_default_targets_asks_for_them(tmp_path: Path) -> None:
    whole = saved_model("llama", tmp_path)
    whole.config.model_type = "unheard-of"
    for block in whole.model.layers:
        block.self_attn.queries = block.self_attn.__dict__["_modules"].pop("q_proj")
    with pytest.raises(ValueError, match=r"no default for unheard-of; name some of .*'queries'"):
        default_targets(whole)
