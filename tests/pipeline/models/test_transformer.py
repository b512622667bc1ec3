import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.pipeline.models.transformer import TransformerConfig, TransformerStage, build_layers

CUTS = [(2,), (1, 2, 3)]


def _config(**changes: Any) -> TransformerConfig:
    small: dict[str, Any] = {"layers": 4, "width": 16, "heads": 2, "vocab": 32, "context": 12}
    return TransformerConfig(**(small | changes))


def _whole(config: TransformerConfig, seed: int = 5) -> TransformerStage:
    return build_layers(config, 0, config.layers, seed=seed, device="cpu")


def _stages(config: TransformerConfig, cuts: tuple[int, ...]) -> list[TransformerStage]:
    edges = itertools.pairwise((0, *cuts, config.layers))
    return [build_layers(config, first, stop, seed=5, device="cpu") for first, stop in edges]


def _ids(config: TransformerConfig, tokens: int = 12) -> Tensor:
    return torch.randint(config.vocab, (3, tokens), generator=torch.Generator().manual_seed(0))


def _backward(stages: list[TransformerStage], ids_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = ids_BT
    for stage in stages:
        x = stage(x)
        assert not x._is_view()
    F.cross_entropy(x[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).backward()
    gradients = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = parameter.grad
    return x, gradients


def _assert_bit_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("tie", ["untied", "exact"])
def test_stages_together_are_the_whole_model(cuts: tuple[int, ...], tie: str) -> None:
    config = _config(tie_embeddings=tie)
    union: dict[str, Tensor] = {}
    for stage in _stages(config, cuts):
        state = stage.state_dict()
        assert not union.keys() & state.keys()
        union |= state
    _assert_bit_equal(union, _whole(config).state_dict())


@pytest.mark.parametrize("cuts", CUTS)
def test_chained_stages_compute_logits_and_gradients_of_the_whole(cuts: tuple[int, ...]) -> None:
    config = _config()
    logits, gradients = _backward(_stages(config, cuts), _ids(config))
    expected, expected_gradients = _backward([_whole(config)], _ids(config))
    assert torch.equal(logits, expected)
    _assert_bit_equal(gradients, expected_gradients)


def test_only_own_layers_are_allocated() -> None:
    config = _config()
    first, middle, last = _stages(config, (1, 2))
    block = sum(p.numel() for p in middle.parameters())
    assert sum(p.numel() for p in first.parameters()) == block + (32 + 12) * 16
    assert sum(p.numel() for p in last.parameters()) == 2 * block + 2 * 16 + 32 * 16
    assert not any(p.is_meta for p in [*first.parameters(), *last.parameters()])


def test_building_leaves_the_global_generator_alone() -> None:
    with torch.random.fork_rng():
        before = torch.random.get_rng_state()
        model = _whole(_config())
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.manual_seed(1234)
        _assert_bit_equal(_whole(_config()).state_dict(), model.state_dict())


def test_seed_and_layer_change_the_values() -> None:
    weights, others = (_whole(_config(), seed).state_dict() for seed in (5, 6))
    name = "blocks.1.attn.qkv.weight"
    assert not torch.equal(weights[name], others[name])
    assert not torch.equal(weights[name], weights["blocks.2.attn.qkv.weight"])


def test_initial_values_follow_gpt2() -> None:
    config = _config(width=128, heads=4, vocab=256)
    for name, value in _whole(config).state_dict().items():
        if value.ndim == 1:
            assert torch.equal(value, torch.full_like(value, float(name.endswith("weight"))))
            continue
        std = 0.02 / (2 * config.layers) ** 0.5 if ".out." in name else 0.02
        assert abs(value.std().item() / std - 1) < 0.05, name


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activation_checkpointing_gives_the_same_gradients(dropout: float) -> None:
    results, recomputed = [], []
    for checkpointing in (False, True, 2):
        config = _config(dropout=dropout, activation_checkpointing=checkpointing)
        model = _whole(config)
        calls: list[nn.Module] = []
        for block in (model.blocks["1"], model.blocks["2"]):
            block.register_forward_pre_hook(lambda block, _, calls=calls: calls.append(block))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            results.append(_backward([model], _ids(config)))
        recomputed.append(len(calls))
    expected, expected_gradients = results[0]
    for output, gradients in results[1:]:
        assert torch.equal(output, expected)
        _assert_bit_equal(gradients, expected_gradients)
    assert recomputed == [2, 4, 3]


def test_later_tokens_do_not_change_earlier_logits() -> None:
    config = _config()
    model = _whole(config)
    ids_BT = _ids(config)
    changed_BT = ids_BT.clone()
    changed_BT[:, 7] = (changed_BT[:, 7] + 1) % config.vocab
    before, after = model(ids_BT), model(changed_BT)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_dropout_acts_in_training_only() -> None:
    config = _config(dropout=0.5)
    model = _whole(config)
    assert not torch.equal(model(_ids(config)), model(_ids(config)))
    model.eval()
    assert torch.equal(model(_ids(config)), _whole(_config()).eval()(_ids(config)))


def test_bf16_autocast_trains() -> None:
    config = _config()
    stages = _stages(config, (2,))
    with torch.autocast("cpu", torch.bfloat16):
        logits, gradients = _backward(stages, _ids(config))
    assert logits.dtype == torch.bfloat16
    expected, _ = _backward([_whole(config)], _ids(config))
    torch.testing.assert_close(logits.float(), expected, atol=0.02, rtol=0.02)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_tied_copies_are_one_parameter_or_start_equal_on_the_first_and_last_stage() -> None:
    model = _whole(_config(tie_embeddings="exact"))
    assert model.token_embedding is not None
    assert model.head is not None
    assert model.tied_weight() is model.token_embedding.weight is model.head.weight
    assert _whole(_config()).tied_weight() is None
    stages = _stages(_config(tie_embeddings="exact"), (1, 3))
    first, middle, last = (stage.tied_weight() for stage in stages)
    assert first is not last is not None is not first
    assert middle is None
    assert torch.equal(first, last)


def test_tied_copies_gradients_add_up_to_the_shared_one() -> None:
    config = _config(tie_embeddings="exact")
    _, gradients = _backward(_stages(config, (2,)), _ids(config))
    _, expected = _backward([_whole(config)], _ids(config))
    total = gradients["token_embedding.weight"] + gradients["head.weight"]
    torch.testing.assert_close(total, expected["token_embedding.weight"])


@pytest.mark.parametrize("place", [0, 1])
def test_sequence_longer_than_the_context_is_rejected(place: int) -> None:
    stages = _stages(_config(), (2,))
    inputs = [torch.zeros(1, 13, dtype=torch.int64), torch.zeros(1, 13, 16)]
    with pytest.raises(ValueError, match=r"13 tokens: the model's context = 12; shorten"):
        stages[place](inputs[place])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 18, "heads": 4}, r"width = 18, heads = 4: .* use width = 16"),
        ({"layers": 0}, r"layers\n.*greater than or equal to 1.*input_value=0"),
        ({"dropout": 1.0}, r"dropout\n.*less than 1.*input_value=1.0"),
        ({"tie_embeddings": "yes"}, r"tie_embeddings\n.*'untied' or 'exact'.*input_value='yes'"),
        ({"depth": 3}, r"depth\n.*not permitted"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(**changes)
