"""How far gradients agree: known answers by unit, and the moves that follow from them."""

import pytest
import torch
from torch import Tensor, nn

from tests.gradcomp.replicas import Replicas, all_of
from thinpipe.gradcomp.agreement import Agreement
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.pipeline.comm.transport import Peers

ROWS = 260
SHAPES = ((40, 50), (ROWS, 64), (7,))  # a matrix, an embedding, a vector


def built(peers: Peers, beta2: float = 0.999) -> tuple[Agreement, list[nn.Parameter]]:
    weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    agreement = Agreement(weights, peers, seed=0)
    agreement.beta2 = beta2
    return agreement, weights


def step(replicas: list[tuple[Agreement, list[nn.Parameter]]], number: int) -> None:
    """Measure, share and count the gradients that are there."""
    for agreement, _ in replicas:
        agreement.sample()
        agreement.keep()
    found = all_of(replicas, lambda one: one[0].share(number, one[0].sample_2U))
    for (agreement, _), mean_2U in zip(replicas, found, strict=True):
        agreement.update(mean_2U)


def measured(size: int, shared: float, noise: float, steps: int = 150) -> list[list[Tensor]]:
    """Gains of replicas whose gradients are a common part, always new, and noise of their own."""
    generator = torch.Generator().manual_seed(0)
    replicas = [built(peers) for peers in local_peers(size)]
    for number in range(steps):
        signal = [shared * torch.randn(shape, generator=generator) for shape in SHAPES]
        for _, weights in replicas:
            for weight, part in zip(weights, signal, strict=True):
                weight.grad = part + noise * torch.randn(part.shape, generator=generator)
        step(replicas, number)
    return [list(agreement.gains(1.0).values()) for agreement, _ in replicas]


@pytest.mark.parametrize(
    ("size", "shared", "noise", "gain"),
    [(4, 0.0, 1.0, 2.0), (3, 1.0, 0.0, 1.0), (4, 1.0, 1.0, (8 / 5) ** 0.5)],
)
def test_moves_become_as_long_as_those_of_averaged_gradients(
    size: int, shared: float, noise: float, gain: float
) -> None:
    """Independent noise: sqrt(R). Equal gradients: 1. A half each: rho is 1/2 + 1/2R."""
    for gains in measured(size, shared, noise):
        matrix, rows, vector = gains
        assert matrix.item() == pytest.approx(gain, rel=0.15)
        assert vector.item() == pytest.approx(gain, rel=0.15)
        assert rows.shape == (ROWS, 1)
        assert rows.mean().item() == pytest.approx(gain, rel=0.15)


def test_what_only_one_replica_sees_counts_as_often_as_there_are_replicas() -> None:
    """Adam brings a rare token's row to full length on one replica; the mean shortens it by R."""
    replicas = [built(peers) for peers in local_peers(4)]
    generator = torch.Generator().manual_seed(0)
    for number in range(150):
        for rank, (_, weights) in enumerate(replicas):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            row = torch.zeros(ROWS, 1)
            row[rank] = 1  # every replica has a token of its own
            assert weights[1].grad is not None
            weights[1].grad *= row
        step(replicas, number)
    for rank, (agreement, weights) in enumerate(replicas):
        gains = agreement.gains(1.0)[weights[1]]
        assert gains[rank].item() == pytest.approx(4.0, rel=0.2)


def test_narrow_matrices_are_measured_whole() -> None:
    """Two numbers per row would be as many bytes as LoRA's factors themselves."""
    (peers,) = local_peers(1)
    lora = [nn.Parameter(torch.zeros(shape)) for shape in ((8, 768), (768, 8), (768, 64))]
    gains = Agreement(lora, peers, seed=0).gains(1.0)
    assert [gains[weight].numel() for weight in lora] == [1, 1, 768]


def test_half_the_power_is_the_root() -> None:
    replicas = [built(peers) for peers in local_peers(2)]
    for number in range(50):
        for rank, (_, weights) in enumerate(replicas):
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 if (number + rank) % 2 else -0.5)
        step(replicas, number)
    agreement, weights = replicas[0]
    own = agreement.gains(0.0)
    for weight in weights:
        whole, half = (agreement.gains(power)[weight] / own[weight] for power in (1.0, 0.5))
        torch.testing.assert_close(half.square(), whole)


def test_before_anything_is_known_moves_count_once() -> None:
    (peers,) = local_peers(1)
    agreement, weights = built(peers)
    assert all(gain.eq(1).all() for gain in agreement.gains(1.0).values())
    assert [agreement.gains(1.0)[weight].numel() for weight in weights] == [1, ROWS, 1]


def test_a_step_that_is_skipped_leaves_no_trace() -> None:
    replicas = [built(peers) for peers in local_peers(2)]
    for skipped in (False, True, False):
        for _, weights in replicas:
            for weight in weights:
                weight.grad = torch.ones_like(weight)
        if skipped:
            weights[0].grad[0, 0] = torch.inf  # type: ignore[index]
            for agreement, _ in replicas:
                agreement.sample()
        else:
            step(replicas, 0)
    for gain in replicas[1][0].gains(0.0).values():
        torch.testing.assert_close(gain, torch.ones_like(gain), rtol=0.01, atol=0)


def test_what_no_replica_has_seen_is_left_alone() -> None:
    """Rows of tokens that did not occur: weight decay moves them, on all alike."""
    replicas = [built(peers) for peers in local_peers(2)]
    for _, weights in replicas:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        weights[1].grad[5:] = 0  # type: ignore[index]
    step(replicas, 0)
    agreement, weights = replicas[0]
    assert (agreement.gains(0.0)[weights[1]] - 1).abs().max() < 0.01


def test_after_a_warm_up_moves_are_as_long_as_they_should_be_at_first() -> None:
    """Adam's variance is that of averaged gradients then, and becomes a replica's own in time."""
    replicas = [built(peers, beta2=0.9) for peers in local_peers(2)]
    generator = torch.Generator().manual_seed(0)
    for agreement, weights in replicas:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        for _ in range(50):
            agreement.sample()
            agreement.keep(averaged=True)
        assert all(gain.eq(1).all() for gain in agreement.gains(1.0).values())
    found = []
    for number in range(40):
        for _, weights in replicas:
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
        step(replicas, number)
        agreement, weights = replicas[0]
        found.append(agreement.gains(1.0)[weights[0]].item())
    assert found[0] < 1.2 < found[-1] < 1.7


def test_it_is_shared_often_at_first_and_then_now_and_then() -> None:
    assert sum(map(Agreement.shares, range(64))) == 64
    assert sum(map(Agreement.shares, range(64, 1064))) == 125


def test_gains_survive_a_restart() -> None:
    found = []
    for restart in (False, True):
        replicas = Replicas(4, "ef_updates", {"subset": 0.5})
        for number in range(12):
            if restart and number == 7:
                replicas.restart()
            replicas.step()
        agreements = [sync._agreement for sync in replicas.syncs]  # type: ignore[attr-defined]
        gains = [gain.flatten() for a in agreements for gain in a.gains(1.0).values()]
        found.append(torch.cat(gains))
    assert torch.equal(*found)
    assert not found[0].eq(1).any()
