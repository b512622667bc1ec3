"""Repeated masks are functions of seed, layer, site, sample and position, and look random."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.dropout import Dropout, DropoutSite, keep_mask
from thinpipe.pipeline.models.transformer import TransformerConfig, build_layers

_few = settings(max_examples=15)
SHAPE = torch.Size((6, 8))


def _dropout(
    rate: float = 0.25, seed: int = 1, layer: int = 2, site: DropoutSite = "mixed"
) -> Dropout:
    return Dropout(rate, "repeated", seed=seed, layer=layer, site=site)


def _dropped(layer: Dropout, ids: list[int]) -> Tensor:
    dropped: Tensor = layer(torch.ones(len(ids), *SHAPE), torch.tensor(ids))
    return dropped


@_few
@given(
    st.lists(st.integers(0, 2**62), min_size=1, max_size=8, unique=True),
    st.integers(0, 7),
    st.integers(0, 2**31),
)
def test_a_samples_mask_does_not_depend_on_its_company(ids: list[int], at: int, seed: int) -> None:
    layer = _dropout(seed=seed)
    together = _dropped(layer, ids)
    at %= len(ids)
    assert torch.equal(_dropped(layer, [ids[at]])[0], together[at])
    assert torch.equal(_dropped(_dropout(seed=seed), ids[::-1]), together.flip(0))


CUTS = [(), (1,), (2,), (1, 2, 3)]
_CONFIG = TransformerConfig(
    layers=4, width=16, heads=2, vocab=32, context=12, dropout=0.3, dropout_masks="repeated"
)


@settings(max_examples=8)
@given(
    cuts=st.sampled_from(CUTS),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    checkpointing=st.booleans(),
    first=st.integers(0, 1000),
)
def test_masks_do_not_depend_on_cut_microbatch_or_recomputation(
    cuts: tuple[int, ...], sizes: list[int], checkpointing: bool, first: int
) -> None:
    config = _CONFIG.model_copy(update={"activation_checkpointing": checkpointing})
    edges = itertools.pairwise([0, *cuts, config.layers])
    stages = [build_layers(config, a, b, seed=3, device="cpu") for a, b in edges]
    whole = build_layers(_CONFIG, 0, 4, seed=3, device="cpu")
    ids_B = torch.arange(first, first + sum(sizes))
    tokens_BT = torch.randint(32, (len(ids_B), 12), generator=torch.Generator().manual_seed(first))
    expected = whole(tokens_BT, Samples(ids_B))
    expected.square().mean().backward()
    outputs = []
    for x, part in zip(tokens_BT.split(sizes), ids_B.split(sizes), strict=True):
        for stage in stages:
            x = stage(x, Samples(part))
        outputs.append(x)
    found = torch.cat(outputs)
    found.square().mean().backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    gradients = dict(whole.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(
                parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-6, msg=name
            )


def test_seed_layer_site_and_sample_change_the_mask() -> None:
    masks = [
        _dropped(_dropout(), [5]),
        _dropped(_dropout(), [6]),
        _dropped(_dropout(), [5 + 2**32]),
        _dropped(_dropout(seed=2), [5]),
        _dropped(_dropout(layer=3), [5]),
        _dropped(_dropout(site="attention"), [5]),
    ]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(masks, 2))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_masks_look_random(rate: float) -> None:
    """Share, neighbours, and samples with neighbouring ids are as independent draws would be."""
    keep = keep_mask(torch.arange(64), torch.Size((4096,)), rate=rate, key=(123, -456)).double()
    spread = (rate * (1 - rate) / keep.numel()) ** 0.5
    assert abs(keep.mean() - (1 - rate)) < 4 * spread
    assert (keep.mean(1) - (1 - rate)).abs().max() < 5 * (rate * (1 - rate) / 4096) ** 0.5
    centred = keep - keep.mean()
    for ours, theirs in (
        (centred[:, 1:], centred[:, :-1]),
        (centred[1:], centred[:-1]),
        (centred[1:, :-1], centred[:-1, 1:]),
    ):
        assert abs((ours * theirs).mean() / keep.var()) < 4 / keep.numel() ** 0.5


def test_kept_values_are_scaled_up_and_evaluation_drops_nothing() -> None:
    layer = _dropout(rate=0.2)
    assert set(_dropped(layer, [1]).unique().tolist()) == {0.0, 1.25}
    x = torch.full((1, *SHAPE), float("nan"))
    assert layer(x, torch.tensor([3])).isnan().all(), "a value that is not finite stays visible"
    layer.eval()
    assert torch.equal(_dropped(layer, [1]), torch.ones(1, *SHAPE))


def test_masks_are_the_same_in_every_release() -> None:
    """Stored: a resumed run must meet the masks it was started with."""
    keep = keep_mask(torch.tensor([7]), torch.Size((16,)), rate=0.5, key=(1, 2))
    assert "".join(str(int(bit)) for bit in keep[0]) == "0100111101110110"


def test_repeated_masks_without_ids_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"belong to samples .* call it with samples"):
        _dropout()(torch.ones(1, 2), None)
