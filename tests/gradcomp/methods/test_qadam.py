"""QAdam: Adam at first; then the variance stands, and momenta travel."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.gradcomp.replicas import Replicas, flat
from thinpipe.gradcomp.methods.qadam import QAdam

LR, BETAS = 0.05, (0.9, 0.999)


def qadam(weight: nn.Parameter, warmup_steps: int) -> QAdam:
    return QAdam([weight], lr=LR, betas=BETAS, weight_decay=0.01, warmup_steps=warmup_steps)


def gradients(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(50, generator=generator) for _ in range(count)]


def test_in_its_warm_up_it_is_adam_to_the_last_bit() -> None:
    one, other = (nn.Parameter(torch.ones(50)) for _ in range(2))
    ours = qadam(one, 10)
    adam = torch.optim.AdamW([other], lr=LR, betas=BETAS, weight_decay=0.01, foreach=False)
    for gradient in gradients(10):
        one.grad, other.grad = gradient.clone(), gradient.clone()
        ours.step()
        adam.step()
        assert torch.equal(one, other)


def test_afterwards_the_variance_and_its_correction_stand() -> None:
    """With one momentum for ever, steps stay as long as they were (BAGUA's grow)."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = QAdam([weight], lr=LR, betas=(0.0, 0.999), weight_decay=0.0, warmup_steps=20)
    moves = []
    for _ in range(200):
        before = weight.item()
        weight.grad = torch.ones(1)
        optimizer.step()
        moves.append(before - weight.item())
    assert optimizer.state[weight]["v"].item() == pytest.approx(1 - 0.999**20)
    assert moves[-1] == pytest.approx(LR, rel=1e-4)


def test_a_row_that_was_never_seen_in_the_warm_up_moves_like_others() -> None:
    """Rare tokens; without a least variance the second row would move by 1e7."""
    weight = nn.Parameter(torch.zeros(2, 8))
    optimizer = QAdam([weight], lr=LR, betas=BETAS, weight_decay=0.0, warmup_steps=5)
    for _ in range(5):
        weight.grad = torch.stack([torch.ones(8), torch.zeros(8)])
        optimizer.step()
    before = weight.detach().clone()
    weight.grad = torch.stack([torch.ones(8), 0.1 * torch.ones(8)])  # a momentum
    optimizer.step()
    seen, unseen = (before - weight.detach()).mean(1)
    assert 0.1 * seen < unseen < 2 * seen


@pytest.mark.parametrize("bits", [8, 4])
def test_momenta_stay_close_to_those_of_exact_sums(bits: int) -> None:
    options = {"warmup_steps": 3, "bits": bits}
    replicas, alone = Replicas(3, "qadam", options), Replicas(3, "allreduce", {})
    for step in range(6):
        for group in (replicas, alone):
            group.step()
        sync = replicas.syncs[0]
        assert sync.leaves == ("gradients" if step < 2 else "updates")
    reached = flat(replicas.nets[0])
    assert all(torch.equal(reached, flat(net)) for net in replicas.nets)
    moved = (flat(alone.nets[0]) - reached).norm() / reached.norm()
    assert moved < 0.2


def test_one_replica_alone_takes_momenta_too() -> None:
    """As many steps as after the warm-up, without anyone to exchange them with."""
    one, two = Replicas(1, "qadam", {"warmup_steps": 2}), Replicas(1, "qadam", {"warmup_steps": 99})
    for _ in range(3):
        one.step()
        two.step()
    state = one.optimizers[0].state[next(one.nets[0].parameters())]
    expected = two.optimizers[0].state[next(two.nets[0].parameters())]
    torch.testing.assert_close(state["m"], expected["m"], rtol=0.02, atol=0.01)


def test_under_another_layout_momenta_go_on_from_the_optimizers() -> None:
    """The exchange starts again: a second warm-up would leave gradients, taken for momenta."""
    options = {"warmup_steps": 2, "bucket_mb": 1e-4}
    whole = Replicas(2, "qadam", options)
    for _ in range(4):
        whole.step()
    saved = copy.deepcopy([net.state_dict() for net in whole.nets])
    adams = copy.deepcopy([optimizer.state_dict() for optimizer in whole.optimizers])
    resumed = Replicas(2, "qadam", {**options, "bucket_mb": 1.0})
    for net, optimizer, weights, state in zip(
        resumed.nets, resumed.optimizers, saved, adams, strict=True
    ):
        net.load_state_dict(weights)
        optimizer.load_state_dict(state)
    resumed.step_number = whole.step_number
    for each in (whole, resumed):
        each.step()
    assert {sync.leaves for sync in resumed.syncs} == {"updates"}
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.1 * LR)  # but for residuals


def test_moments_of_a_model_in_bf16_are_restored_in_fp32() -> None:
    """A resumed run goes on as one that was not interrupted."""
    through, again = (
        Replicas(2, "qadam", {"warmup_steps": 3}, dtype=torch.bfloat16) for _ in range(2)
    )
    for step in range(6):
        if step in (2, 4):
            again.restart()
        for replicas in (through, again):
            replicas.step()
    assert torch.equal(through.parameters()[0], again.parameters()[0])
