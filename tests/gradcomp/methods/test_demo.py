"""DeMo: known answers, and the law of its momentum."""

import pytest
import torch
from torch import Tensor

from tests.gradcomp.replicas import Replicas, all_of, flat, make_net
from thinpipe.gradcomp.methods.demo import SIDE, Tiles, basis

SHAPES = [torch.Size(s) for s in ((64, 64), (100, 130), (5,), (7, 3, 11), (64,), (1, 1), (4097,))]
CPU = torch.device("cpu")


def test_the_transform_is_orthonormal_and_its_inverse_exact() -> None:
    torch.testing.assert_close(basis(CPU) @ basis(CPU).T, torch.eye(SIDE), rtol=0, atol=1e-6)
    tensors = [torch.randn(shape) for shape in SHAPES]
    tiles = Tiles(SHAPES, CPU)
    coefficients = tiles.transform(tensors)
    assert coefficients.shape == (tiles.count, SIDE, SIDE)
    for tensor, back in zip(tensors, tiles.invert(coefficients), strict=True):
        torch.testing.assert_close(back, tensor, rtol=0, atol=2e-6)
    norm = torch.cat([tensor.flatten() for tensor in tensors]).norm()
    assert coefficients.norm() == pytest.approx(float(norm), rel=1e-5)


def test_one_that_sends_all_is_sign_descent_bit_for_bit() -> None:
    """One replica, everything kept, no momentum: signs of what is sent are those of g's waves."""
    replicas = Replicas(1, "demo", {"kept": 4096, "decay": 0.0, "delayed": False})
    expected = make_net()
    for step in range(3):
        replicas.backward()
        replicas.syncs[0].before_step()
        gradients = []
        net = make_net()
        net.load_state_dict(expected.state_dict())
        generator = torch.Generator().manual_seed(1000 * step)
        (net(torch.randn(4, 6, generator=generator)).square().sum() / 4).backward()
        tiles = Tiles([p.shape for p in net.parameters()], CPU)
        waves = tiles.transform([p.grad for p in net.parameters() if p.grad is not None])
        gradients = tiles.invert(waves.sign())
        with torch.no_grad():
            for parameter, update in zip(expected.parameters(), gradients, strict=True):
                parameter.mul_(1 - 0.05 * 0.01).add_(update.sign(), alpha=-0.05)
        replicas.optimize()
        replicas.syncs[0].after_step()
        assert torch.equal(flat(replicas.nets[0]), flat(expected))


def test_what_is_sent_and_what_is_left_are_the_momentum() -> None:
    replicas = Replicas(2, "demo", {"kept": 4, "decay": 0.9})
    for _ in range(3):
        replicas.step()
    sync = replicas.syncs[0]
    before = [momentum.clone() for momentum in sync.state_dict()["momenta"]]
    replicas.backward()
    gradients = [2 * p.grad for p in replicas.nets[0].parameters() if p.grad is not None]
    finite, strongest = sync._select()  # type: ignore[attr-defined]
    assert finite
    sent = sync._tiles.invert(strongest.view(-1, SIDE, SIDE))  # type: ignore[attr-defined]
    left = sync._left  # type: ignore[attr-defined]
    for old, gradient, one, rest in zip(before, gradients, sent, left, strict=True):
        torch.testing.assert_close(one + rest, 0.9 * old + gradient, rtol=1e-5, atol=1e-5)


def test_one_that_joins_gets_a_message_and_sends_the_same() -> None:
    """It is small: all wait for it."""
    replicas, other = (Replicas(2, "demo", {"kept": 4}) for _ in range(2))
    for _ in range(3):
        replicas.step()
    shared = replicas.syncs[0].shared_state()  # type: ignore[attr-defined]
    assert shared["pending"].nbytes * 50 < replicas.syncs[0].state_dict()["pending"].nbytes
    other.syncs[0].load_state_dict(shared)
    again = other.syncs[0].shared_state()  # type: ignore[attr-defined]
    assert torch.equal(again["pending"], shared["pending"])


def updates(replicas: Replicas, gradient: list[Tensor], steps: int) -> list[Tensor]:
    """What the optimizer is given in each step, if gradients never change."""
    found = []
    for _ in range(steps):
        replicas.begin()
        for net in replicas.nets:
            for parameter, given in zip(net.parameters(), gradient, strict=True):
                parameter.grad = given.clone()
        all_of(replicas.syncs, lambda sync: sync.before_step())
        found.append(torch.cat([p.grad.flatten() for p in replicas.nets[0].parameters()]))  # type: ignore[union-attr]
        replicas.commit()
        all_of(replicas.syncs, lambda sync: sync.after_step())
    return found


def test_a_delayed_answer_is_that_of_the_step_before() -> None:
    gradient = [torch.randn_like(p) for p in make_net().parameters()]
    at_once = updates(Replicas(2, "demo", {"kept": 4, "delayed": False}), gradient, 4)
    delayed = updates(Replicas(2, "demo", {"kept": 4}), gradient, 5)
    assert not delayed[0].any()
    for one, other in zip(at_once, delayed[1:], strict=True):
        assert torch.equal(one, other)
