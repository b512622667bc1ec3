"""Values of a deferred model: those that its constructor says, whichever part is computed."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from thinpipe.pipeline.models.own.deferred import DeferredModel

D = 16


class Everything(nn.Module):
    """Initialised in every way that constructors use."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(D, D) * 0.02)
        self.ones = nn.Parameter(torch.ones(D))
        self.orthogonal = nn.Parameter(torch.empty(D, D))
        nn.init.orthogonal_(self.orthogonal)
        self.truncated = nn.Parameter(torch.empty(D, 4 * D))
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.03, b=0.03)
        self.table = nn.Embedding(10, D, padding_idx=3)
        self.linear = nn.Linear(D, D)
        with torch.no_grad():
            self.linear.bias.copy_(torch.linspace(0, 1, D))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("given", torch.tensor([1.0, 2.5]), persistent=False)
        self.plain = torch.arange(5) * 2
        self.norm = nn.BatchNorm1d(D)
        self.attention = nn.MultiheadAttention(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Embedding(600, D), Everything(), Everything(), nn.Linear(D, 600))

    def narrow(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding) and module.padding_idx is None:
            nn.init.normal_(module.weight, std=0.01)

    layers.apply(narrow)
    layers[3].weight = layers[0].weight
    return layers


@pytest.fixture(scope="module")
def deferred() -> DeferredModel:
    return DeferredModel(model, "model")


@torch.no_grad()
def test_values_are_what_the_constructor_says(deferred: DeferredModel) -> None:
    first, second, _ = deferred.fill(list(deferred.skeleton)[:3], seed=0, device="cpu")
    assert 0.009 < float(first.weight.std()) < 0.011
    assert isinstance(second, Everything)
    assert 0.015 < float(second.scaled.std()) < 0.025
    torch.testing.assert_close(second.orthogonal @ second.orthogonal.T, torch.eye(D))
    assert float(second.truncated.abs().max()) <= 0.03
    assert 0.01 < float(second.truncated.std()) < 0.02
    assert not second.table.weight[3].any()
    assert 0.8 < float(second.table.weight[4:].std()) < 1.2
    assert float(second.linear.weight.abs().max()) <= 1 / math.sqrt(D)
    torch.testing.assert_close(second.linear.bias, torch.linspace(0, 1, D))
    assert torch.equal(second.mask, torch.ones(4, 4).tril())
    assert second.given.tolist() == [1.0, 2.5]
    assert second.plain.tolist() == [0, 2, 4, 6, 8]
    assert torch.equal(second.norm.running_var, torch.ones(D))
    assert int(second.norm.num_batches_tracked) == 0


def test_a_layer_has_the_same_values_alone_as_in_the_whole(deferred: DeferredModel) -> None:
    layers = list(deferred.skeleton)
    whole, alone = deferred.fill(layers, seed=5, device="cpu"), []
    for layer in layers:
        alone += deferred.fill([layer], seed=5, device="cpu")
    for one, other in zip(whole, alone, strict=True):
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    assert whole[0].weight is whole[3].weight, "what is shared stays shared"


def test_equal_layers_and_other_seeds_get_other_values(deferred: DeferredModel) -> None:
    layers = list(deferred.skeleton)
    _, one, two, _ = deferred.fill(layers, seed=0, device="cpu")
    (other,) = deferred.fill(layers[1:2], seed=1, device="cpu")
    assert not torch.equal(one.scaled, two.scaled)
    assert not torch.equal(one.truncated, two.truncated)
    assert not torch.equal(one.scaled, other.scaled)


def test_building_draws_nothing_from_the_global_generator(deferred: DeferredModel) -> None:
    before = torch.random.get_rng_state()
    DeferredModel(model, "model")
    deferred.fill(list(deferred.skeleton), seed=0, device="cpu")
    assert torch.equal(before, torch.random.get_rng_state())


def test_frozen_parameters_stay_frozen() -> None:
    deferred = DeferredModel(lambda: nn.Linear(2, 2).requires_grad_(False), "model")
    (layer,) = deferred.fill([deferred.skeleton], seed=0, device="cpu")
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_parameters_that_nothing_initialises_are_rejected() -> None:
    class Unset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 3))

    deferred = DeferredModel(Unset, "mine:model")
    with pytest.raises(ValueError, match=r"mine:model: Unset layer never gives weight a value"):
        deferred.fill([deferred.skeleton], seed=0, device="cpu")


def test_constructors_that_look_at_values_are_rejected() -> None:
    def looks() -> nn.Module:
        return nn.Linear(2, int(torch.randn(1).item()))

    with pytest.raises(ValueError, match=r"mine:model: .* on the meta device"):
        DeferredModel(looks, "mine:model")
    with pytest.raises(ValueError, match=r"returned int, not a module"):
        DeferredModel(lambda: 3, "mine:model")  # type: ignore[arg-type, return-value]


def test_tensors_that_are_made_on_the_cpu_have_the_values_that_they_are_given() -> None:
    """`torch.Tensor` knows no device but that."""

    def make() -> nn.Sequential:
        layer = nn.Linear(D, D, device="cpu")
        layer.bias = nn.Parameter(torch.Tensor(D))
        nn.init.uniform_(layer.bias, 3.0, 4.0)
        nn.init.trunc_normal_(layer.weight, mean=8.0, a=7.0, b=9.0)
        return nn.Sequential(layer)

    model = DeferredModel(make, "model")
    (layer,) = model.fill([*model.skeleton], seed=0, device="cpu")  # type: ignore[call-overload]
    assert 3 <= layer.bias.min() <= layer.bias.max() <= 4
    assert 7 <= layer.weight.min() <= layer.weight.max() <= 9


def test_usual_layers_are_built_without_torchs_compiler() -> None:
    """Its import takes a second, which each command would need."""
    code = """
import sys
from torch import nn
from thinpipe.pipeline.models.own.deferred import DeferredModel
DeferredModel(lambda: nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9)), "model")
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
