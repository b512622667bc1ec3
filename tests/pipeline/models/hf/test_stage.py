from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.huggingface import LAYERS, MODELS, TRIED, VOCAB, saved_model, section, settings
from tests.often import mostly_slow
from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.hf import init
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.stage import HuggingFaceStage, build_stage

CUTS = ((0, 2), (2, 4), (4, LAYERS))
OFTEN = {"gpt2", "opt-350m", "llama-tied", "qwen2", "gemma2", "bert", "deberta", "mixtral"}
"""One of each way that embeddings, masks, heads and files are made."""


def build(
    name: str, folder: Path, bounds: tuple[tuple[int, int], ...] = CUTS, **more: Any
) -> list[HuggingFaceStage]:
    config = HuggingFaceConfig(**section(name, folder, **more))
    return [build_stage(config, *range_, seed=0, device="cpu") for range_ in bounds]


def padded_batch() -> tuple[Tensor, Samples]:
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(5, VOCAB, (2, 9), generator=generator)
    mask_BT = torch.ones(2, 9, dtype=torch.int64)
    mask_BT[1, 6:] = 0
    return ids_BT, Samples(torch.arange(2), mask_BT)


def run(stages: list[HuggingFaceStage]) -> Tensor:
    """Logits; gradients are left in the parameters, as if hidden states had crossed links."""
    x, samples = padded_batch()
    ends = []
    for stage in stages:
        start = x.detach().requires_grad_(x.is_floating_point())
        x = stage.eval()(start, samples)
        assert not x._is_view()
        ends.append((start, x))
    logits = x.detach()
    gradient = gradient_of(logits)
    for start, end in reversed(ends):
        end.backward(gradient)
        gradient = start.grad if start.grad is not None else gradient
    return logits


def gradient_of(logits: Tensor) -> Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))


def reference(model: Any) -> Tensor:
    ids_BT, samples = padded_batch()
    logits: Tensor = model(input_ids=ids_BT, attention_mask=samples.mask_BT).logits
    logits.backward(gradient_of(logits))
    return logits.detach()


def summed_gradients(stages: list[HuggingFaceStage]) -> dict[str, Tensor]:
    """By name in the whole model, copies of shared parameters added up."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            assert parameter.grad is not None, name
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


@pytest.mark.parametrize("name", mostly_slow([*MODELS, *TRIED], OFTEN.__contains__))
def test_stages_from_shards_compute_what_the_whole_model_does(name: str, tmp_path: Path) -> None:
    whole = saved_model(name, tmp_path)
    stages = build(name, tmp_path)
    for stage in stages:
        stage.requires_grad_(True)  # shared parts are frozen: here their copies are added up
    assert torch.equal(run(stages), reference(whole))
    gradients = summed_gradients(stages)
    if whole.config.tie_word_embeddings and whole.get_output_embeddings() is not None:
        tied = stages[-1].model.get_output_embeddings().weight
        head = next(n for n, p in stages[-1].model.named_parameters() if p is tied)
        tied = whole.get_input_embeddings().weight
        embedding = next(n for n, p in whole.named_parameters() if p is tied)
        gradients[embedding] = gradients[embedding] + gradients.pop(head)
    for parameter_name, parameter in whole.named_parameters():
        difference = (gradients.pop(parameter_name) - parameter.grad).abs().max()
        assert difference <= rounding_of_sum(stages, parameter_name), parameter_name
    assert not gradients


def rounding_of_sum(stages: list[HuggingFaceStage], name: str) -> float:
    """How far the sum of a parameter's gradients may depend on its order: of a term for each layer,
    (terms - 1) * eps * sum |term|. Exact where one stage holds the parameter.
    """
    copies = [
        parameter.grad.abs()
        for stage in stages
        for own, parameter in stage.model.named_parameters()
        if own == name and parameter.grad is not None
    ]
    if len(copies) < 2:
        return 0.0
    return (LAYERS - 1) * torch.finfo(torch.float32).eps * float(sum(copies[1:], copies[0]).max())


@pytest.mark.parametrize("name", ["llama", "deberta"])
def test_a_stage_opens_only_files_with_its_own_tensors(name: str, tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section(name, tmp_path))
    weights = config.weight_files
    assert weights is not None
    needed = (".2.", ".3.", "rel_emb", "encoder.LayerN")
    own = {file for name, file in weights.files.items() if any(part in name for part in needed)}
    unneeded = set(weights.files.values()) - own
    assert unneeded
    for file in unneeded:
        (tmp_path / file).unlink()
    stage = build_stage(config, 2, 4, seed=0, device="cpu")
    assert all(torch.isfinite(parameter).all() for parameter in stage.parameters())


@pytest.mark.parametrize("name", mostly_slow(MODELS, (OFTEN - {"qwen2"}).__contains__))
def test_random_weights_do_not_depend_on_the_cut(name: str, tmp_path: Path) -> None:
    settings(name).save_pretrained(tmp_path)
    config = HuggingFaceConfig(**section(name, tmp_path, config=str(tmp_path)))
    before = torch.random.get_rng_state()
    whole = build_stage(config, 0, LAYERS, seed=3, device="cpu")
    expected = whole.state_dict()
    for first, stop in CUTS:
        stage = build_stage(config, first, stop, seed=3, device="cpu")
        for parameter_name, tensor in stage.state_dict().items():
            assert torch.equal(tensor, expected[parameter_name]), parameter_name
    assert torch.equal(before, torch.random.get_rng_state())
    other = build_stage(config, 0, LAYERS, seed=4, device="cpu").state_dict()
    assert any(not torch.equal(other[key], tensor) for key, tensor in expected.items())
    x, samples = padded_batch()
    assert torch.isfinite(whole(x, samples)).all()  # buffers such as rotary tables are filled too


def test_random_weights_have_the_family_s_own_spread(tmp_path: Path) -> None:
    settings("gpt2").save_pretrained(tmp_path)
    config = HuggingFaceConfig(config=str(tmp_path))
    stage = build_stage(config, 0, LAYERS, seed=0, device="cpu")
    assert stage.model.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    spread = stage.model.transformer.h[1].mlp.c_proj.weight.std().item()
    assert spread == pytest.approx(0.02 / (2 * LAYERS) ** 0.5, rel=0.05)  # of residual branches
    assert torch.equal(stage.model.transformer.ln_f.weight, torch.ones(32))


def test_what_files_hold_is_not_drawn_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, seeded = [], init.seeded
    monkeypatch.setattr(init, "seeded", lambda seed, name: names.append(name) or seeded(seed, name))
    config = HuggingFaceConfig.model_validate(section("llama", tmp_path / "source"))
    for bounds in ((0, 2), (2, LAYERS)):
        stage = build_stage(config, *bounds, seed=0, device="cpu")
        assert not any(tensor.isnan().any() for tensor in stage.state_dict().values())
    of_stages = {name for name in names if "." in name or "head" in name}
    assert of_stages == {"model.rotary_emb"}  # no file holds its table


def test_a_stage_has_its_own_part_under_the_names_of_the_whole_model(tmp_path: Path) -> None:
    whole = saved_model("llama", tmp_path)
    found: dict[str, list[int]] = {}
    for stage in build("llama", tmp_path):
        assert all(not parameter.is_meta for parameter in stage.parameters())
        for name, parameter in stage.model.named_parameters():
            found.setdefault(name, []).append(parameter.numel())
    assert found == {name: [parameter.numel()] for name, parameter in whole.named_parameters()}


def test_a_head_tied_to_an_embedding_elsewhere_starts_equal(tmp_path: Path) -> None:
    first, _, last = build("gpt2", tmp_path, tie_embeddings="exact")
    embedding, head = first.tied_weight(), last.tied_weight()
    assert embedding is not None
    assert head is not None
    assert torch.equal(embedding, head)
    assert build("gpt2", tmp_path)[0].tied_weight() is None
    (whole,) = build("gpt2", tmp_path, ((0, LAYERS),), tie_embeddings="exact")
    tied = whole.model.get_input_embeddings().weight
    assert whole.tied_weight() is whole.model.get_output_embeddings().weight is tied


def test_modules_that_all_stages_share_are_frozen_where_copies_would_diverge(
    tmp_path: Path,
) -> None:
    frozen = {
        name
        for stage in build("deberta", tmp_path)
        for name, parameter in stage.model.named_parameters()
        if not parameter.requires_grad
    }
    assert frozen == {
        "deberta.encoder.rel_embeddings.weight",
        "deberta.encoder.LayerNorm.weight",
        "deberta.encoder.LayerNorm.bias",
    }
    (whole,) = build("deberta", tmp_path, ((0, LAYERS),))
    assert all(parameter.requires_grad for parameter in whole.parameters())


def test_dropout_is_the_folder_s_unless_overridden(tmp_path: Path) -> None:
    saved_model("gpt2", tmp_path, resid_pdrop=0.3)
    assert HuggingFaceConfig(pretrained=str(tmp_path)).fresh_dropout == 0.3
    x, samples = padded_batch()
    for dropout, deterministic in ((None, False), (0.0, True)):
        (stage,) = build("gpt2", tmp_path, ((0, 2),), dropout=dropout)
        stage.train()
        assert torch.equal(stage(x, samples), stage(x, samples)) is deterministic


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_activation_checkpointing_gives_the_same_gradients(name: str, tmp_path: Path) -> None:
    gradients, kept = [], []
    for checkpointing in (False, 2, True):
        (stage,) = build(name, tmp_path, ((0, 2),), activation_checkpointing=checkpointing)
        x, samples = padded_batch()
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor.nbytes) or tensor, lambda tensor: tensor
        ):
            output = stage.train()(x, samples)
        output.square().sum().backward()
        gradients.append(summed_gradients([stage]))
        kept.append(sum(saved))
    assert kept[0] > kept[1] > kept[2]
    for parameter_name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][parameter_name])
