"""Packed examples and prefixes in models of the transformers library."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.huggingface import LAYERS, VOCAB, saved_model, section, settings
from tests.often import mostly_slow
from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.masks import check_masks, mask_inputs
from thinpipe.pipeline.models.hf.stage import HuggingFaceStage, build_stage

WIDE = {"sliding_window": 16}  # wider than the sequences here
CHANGES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("gpt2", "opt", "gptj", "gpt-neox", "llama")},
    **{name: {} for name in ("qwen3", "phi", "gemma", "olmo", "olmo2")},
    **dict.fromkeys(("qwen2", "phi3", "gemma2", "gemma3"), WIDE),
    "mistral": {"sliding_window": None},
}
OFTEN = {"gpt2", "opt", "gptj", "llama", "gemma3"}
"""One of each way that positions, masks and rotary tables are made."""
CUTS = ((0, 2), (2, 4), (4, LAYERS))
EXAMPLES = ((0, 5), (5, 9))  # of the sequence's 11 tokens; the last two are padding
PROMPTS = (3, 2)
CLOSE = {"rtol": 1e-4, "atol": 2e-6}


@dataclass
class _Cut:
    """A model of transformers as a whole, and in three stages."""

    name: str
    whole: Any
    stages: list[HuggingFaceStage]

    def __call__(self, ids_BT: Tensor, samples: Samples) -> Tensor:
        x = ids_BT
        for stage in self.stages:
            x = stage(x, samples)
        return x


@pytest.fixture(scope="module", params=mostly_slow(CHANGES, OFTEN.__contains__))
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Cut:
    name, folder = request.param, tmp_path_factory.mktemp("model")
    whole = saved_model(name, folder, **CHANGES[name])
    return _Cut(name, whole, _stages(name, folder, CUTS))


def _stages(name: str, folder: Path, bounds: tuple[tuple[int, int], ...]) -> list[HuggingFaceStage]:
    config = HuggingFaceConfig(**section(name, folder))
    return [build_stage(config, *range_, seed=0, device="cpu").eval() for range_ in bounds]


def _ids() -> Tensor:
    return torch.randint(5, VOCAB, (1, 11), generator=torch.Generator().manual_seed(0))


def _one_example() -> Samples:
    """A prompt of three tokens and a response of six, padded."""
    places_BT = torch.arange(11)[None]
    return Samples(torch.tensor([0]), places_BT < 9, prefix_BT=places_BT < 3)


def _samples(*, prefix: bool = True) -> Samples:
    segments_BT, prefix_BT = torch.zeros(2, 1, 11, dtype=torch.int32)
    for number, ((first, stop), prompt) in enumerate(zip(EXAMPLES, PROMPTS, strict=True), start=1):
        segments_BT[:, first:stop] = number
        prefix_BT[:, first : first + prompt] = 1
    return Samples(torch.tensor([0]), segments_BT > 0, segments_BT, prefix_BT if prefix else None)


@torch.no_grad()
def test_a_packed_example_has_the_logits_it_has_alone(cut: _Cut) -> None:
    ids_BT = _ids()
    together = cut(ids_BT, _samples(prefix=False))
    for first, stop in EXAMPLES:
        alone = cut.whole(input_ids=ids_BT[:, first:stop]).logits  # without any mask of ours
        torch.testing.assert_close(together[:, first:stop], alone, **CLOSE)


@torch.no_grad()
def test_a_packed_prompt_has_the_logits_it_has_alone(cut: _Cut) -> None:
    ids_BT, packed = _ids(), _samples()
    together = cut(ids_BT, packed)
    assert packed.prefix_BT is not None
    for first, stop in EXAMPLES:
        prompt = Samples(packed.ids_B, prefix_BT=packed.prefix_BT[:, first:stop])
        alone = cut(ids_BT[:, first:stop], prompt)
        torch.testing.assert_close(together[:, first:stop], alone, **CLOSE)


@pytest.mark.parametrize("packed", [True, False])
@torch.no_grad()
def test_a_prompt_sees_itself_in_both_directions_and_no_response(cut: _Cut, packed: bool) -> None:
    samples = _samples() if packed else _one_example()
    before = cut(_ids(), samples)

    def changed(place: int) -> list[bool]:
        ids_BT = _ids()
        ids_BT[:, place] = (ids_BT[:, place] - 4) % (VOCAB - 5) + 5
        return ((cut(ids_BT, samples) - before).abs().amax(-1)[0, :9] > 1e-6).tolist()

    after = [not packed] * 4  # the second example, or the end of the response
    assert changed(2) == [True] * 5 + after  # the last token of the first prompt
    assert changed(3) == [False] * 3 + [True] * 2 + after  # the first of its response
    assert changed(8) == [False] * 8 + [True]


def test_three_stages_compute_what_the_whole_model_does(cut: _Cut) -> None:
    ids_BT, samples = _ids().repeat(2, 1), _samples()
    assert samples.mask_BT is not None
    assert samples.segments_BT is not None
    assert samples.prefix_BT is not None
    samples = Samples(
        torch.arange(2),
        samples.mask_BT.repeat(2, 1),
        torch.cat([samples.segments_BT, samples.segments_BT.clamp(max=1)]),
        samples.prefix_BT.repeat(2, 1),
    )
    attention = cut.whole.config._attn_implementation
    inputs = mask_inputs(samples, 11, attention=attention, device=torch.device("cpu"))
    cut.whole.zero_grad()
    expected = cut.whole(input_ids=ids_BT, **inputs).logits
    logits = cut(ids_BT, samples)
    assert torch.equal(logits, expected)
    gradient = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(gradient)
    logits.backward(gradient)
    tied = cut.whole.get_output_embeddings().weight is cut.whole.get_input_embeddings().weight
    parameters = {n: p for stage in cut.stages for n, p in stage.model.named_parameters()}
    for name, parameter in cut.whole.named_parameters():
        if tied and parameter is cut.whole.get_input_embeddings().weight:
            continue  # its gradient is in two places here
        assert torch.equal(parameters[name].grad, parameter.grad), name


def test_checkpointing_and_autocast_keep_the_mask(tmp_path: Path) -> None:
    gradients = []
    for again in (False, True):
        config = HuggingFaceConfig(**section("gptj", tmp_path, activation_checkpointing=again))
        stage = build_stage(config, 0, LAYERS, seed=0, device="cpu").train()
        with torch.autocast("cpu", torch.bfloat16):
            logits = stage(_ids(), _samples())
        stage.eval()
        with torch.no_grad():
            exact = stage(_ids(), _samples())
        torch.testing.assert_close(logits.float(), exact, atol=0.05, rtol=0.05)
        logits.float().square().sum().backward()
        gradients.append([parameter.grad for parameter in stage.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-neo", r"'gpt_neo': its blocks add causal and local masks.*use packing = false"),
        ("bert", r"'bert': it is an encoder.*use packing = false"),
        (
            "mistral",
            r"'mistral', sliding_window = 4: sequences of 11 .* sequence_length of at most",
        ),
        ("gemma2", r"'gemma2', sliding_window = 4: sequences of 11"),
    ],
)
def test_families_that_cannot_are_named(name: str, message: str, tmp_path: Path) -> None:
    (stage,) = _stages(name, tmp_path, ((0, 2),))
    for samples in (_samples(prefix=False), _one_example()):
        with pytest.raises(ValueError, match=message):
            stage(_ids(), samples)


def test_what_is_checked_before_a_run() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    phi3 = settings("phi3", rope_parameters=rope, original_max_position_embeddings=8)
    check_masks(settings("qwen2", max_window_layers=LAYERS), 11)  # no layer is below that
    check_masks(phi3, 8)
    with pytest.raises(ValueError, match=r"original_max_position_embeddings = 8: .* of 9 tokens"):
        check_masks(phi3, 9)
    with pytest.raises(ValueError, match=r"use_bidirectional_attention it is no causal model"):
        check_masks(settings("gemma3", **WIDE, use_bidirectional_attention=True), 11)
    other = settings("llama")
    other.model_type = "cohere"
    message = r"'cohere': it has not been tested .* set model.self_check = true, wh"
    with pytest.raises(ValueError, match=message):
        check_masks(other, 11)
    check_masks(other, 11, tried=True)
    with pytest.raises(ValueError, match=r"attn_implementation = 'flash_attention_2'.*\"sdpa\""):
        mask_inputs(_samples(), 11, attention="flash_attention_2", device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["mixtral", "mpt", "gptj"])
def test_the_self_check_passes_families_that_pack(name: str, tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section(name, tmp_path, self_check=True))
    config.check_masks(11)
    config.check_packing()
    if name != "gptj":  # which is listed
        with pytest.raises(ValueError, match=r"set model.self_check = true, which tries it"):
            HuggingFaceConfig(**section(name, tmp_path)).check_masks(11)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-next", r"'qwen3_next': packed .* alone: logits differ by .*; use packing = false"),
        ("bloom", r"'bloom': packed .* alone \(ValueError: .*\); use packing = false"),
    ],
)
def test_the_self_check_names_families_that_do_not(name: str, message: str, tmp_path: Path) -> None:
    config = HuggingFaceConfig(**section(name, tmp_path, self_check=True))
    with pytest.raises(ValueError, match=message):
        config.check_packing()
