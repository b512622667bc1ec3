"""How far gradients agree: known answers, and what a gain makes of it."""

import pytest
import torch
from torch import nn

from tests.gradcomp.replicas import Replicas, all_of
from thinpipe.gradcomp.agreement import Agreement
from thinpipe.gradcomp.local_peers import local_peers


def measured(size: int, shared: float, noise: float, *, exchanges: int = 60) -> list[float]:
    """rho of replicas whose gradients are a common part and noise of their own."""
    generator = torch.Generator().manual_seed(0)
    built = []
    for peers in local_peers(size):
        weights = [nn.Parameter(torch.zeros(50, 40)), nn.Parameter(torch.zeros(7))]
        built.append((Agreement(weights, peers), weights))
    signal = [shared * torch.randn(w.shape, generator=generator) for w in built[0][1]]
    for number in range(exchanges):
        for agreement, weights in built:
            for weight, part in zip(weights, signal, strict=True):
                weight.grad = part + noise * torch.randn(part.shape, generator=generator)
            agreement.sample()
        found = all_of(built, lambda one, number=number: one[0].share(number, one[0].sample_n))
        for (agreement, _), samples in zip(built, found, strict=True):
            agreement.update(samples)
    return [agreement.rho for agreement, _ in built]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_independent_noise_is_one_over_the_replicas(size: int) -> None:
    found = measured(size, 0.0, 1.0)
    assert found == [pytest.approx(1 / size, rel=0.02)] * size
    assert len(set(found)) == 1  # all from the same numbers


def test_equal_gradients_agree() -> None:
    assert measured(3, 1.0, 0.0) == [pytest.approx(1, abs=1e-6)] * 3


def test_in_between_it_is_the_share_of_what_is_common() -> None:
    (rho, *_) = measured(4, 1.0, 1.0)
    assert 0.5 < rho < 0.75  # signals differ in size: noise counts where there is little


def test_before_anything_is_known_moves_count_once() -> None:
    (peers,) = local_peers(1)
    assert Agreement([nn.Parameter(torch.zeros(3))], peers).rho == 1


def test_a_sample_is_spread_over_all_parameters_and_bounded() -> None:
    (peers,) = local_peers(1)
    weights = [nn.Parameter(torch.zeros(n)) for n in (100_000, 50_000, 3)]
    weights.append(nn.Parameter(torch.zeros(7), requires_grad=False))
    agreement = Agreement(weights, peers)
    agreement.sample()
    assert agreement.sample_n.numel() == 4096
    taken = [places.numel() for places in agreement._places]
    assert taken[0] == pytest.approx(2 * taken[1], abs=2)


def test_what_is_not_finite_is_not_counted() -> None:
    (peers,) = local_peers(1)
    agreement = Agreement([nn.Parameter(torch.zeros(3))], peers)
    agreement.update([torch.tensor([1.0, 2.0, 3.0])])
    agreement.update([torch.tensor([torch.nan, 2.0, 3.0])])
    assert agreement.rho == pytest.approx(1)


def test_the_gain_follows_and_survives_a_restart() -> None:
    """Gradients of these replicas are of different data: they agree in part."""
    gains = []
    for restart in (False, True):
        replicas = Replicas(4, "ef_updates", {"subset": 0.5})
        for step in range(20):
            if restart and step == 13:
                replicas.restart()
            replicas.step()
        gains.append([sync._buckets[0].gain for sync in replicas.syncs])  # type: ignore[attr-defined]
    assert gains[0] == gains[1]
    assert len(set(gains[0])) == 1
    assert 1 < gains[0][0] <= 4**0.25 * 1.01
