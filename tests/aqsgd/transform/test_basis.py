"""Bases and steps: nearly exact in floats, and exact in whole numbers however they are computed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from thinpipe.aqsgd.transform.basis import Basis, rescaled, step_index, step_size, turned


def orthonormal(width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(width, width, generator=generator))[0]


def nearest(width: int, seed: int = 0, wide: int = 0) -> Basis:
    return Basis.nearest(orthonormal(width, seed), wide)


def test_restoring_undoes_projecting() -> None:
    basis, x_ND = nearest(96), torch.randn(50, 96)
    again_ND = basis.restore(basis.project(x_ND))
    assert float((again_ND - x_ND).norm() / x_ND.norm()) < 1e-3
    same = Basis.identity(96)
    assert torch.equal(same.restore(same.project(x_ND)), x_ND)


def test_numbers_of_another_basis_stand_for_the_same_tokens() -> None:
    old, new = nearest(64), nearest(64, 1)
    q_NK = torch.randint(-200, 201, (40, 64), dtype=torch.int32)
    before_ND, after_ND = (
        old.restore(q_NK.float()),
        new.restore(turned(q_NK, new.turn_from(old)).float()),
    )
    assert float((after_ND - before_ND).abs().max()) < 3  # each number is rounded by up to a half


def test_turning_is_exact_in_any_order() -> None:
    """Sums in another order give the same whole numbers, up to the largest numbers there are."""
    width = 200
    old, new = nearest(width), nearest(width, 1)
    q_NK = torch.randint(-(2**15), 2**15, (16, width), dtype=torch.int32)
    order = torch.randperm(width)
    shuffled = [replace(basis, entry_DK=basis.entry_DK[order].contiguous()) for basis in (old, new)]
    turns = new.turn_from(old), shuffled[1].turn_from(shuffled[0])
    assert torch.equal(*turns)
    assert torch.equal(turned(q_NK, turns[0]), turned(q_NK[:, order], turns[1][:, order]))


@pytest.mark.parametrize("index", [-400, -37, -4, -1, 0, 1, 2, 3, 4, 10, 400])
def test_steps_are_quarter_octaves(index: int) -> None:
    assert step_size(index) == pytest.approx(2 ** (index / 4), rel=1e-6)
    assert step_index(step_size(index)) == index


@pytest.mark.parametrize(("old", "new"), [(0, 0), (4, 0), (0, 4), (-7, 3), (2, -9)])
def test_numbers_in_other_steps_are_rounded_to_nearest(old: int, new: int) -> None:
    q_NK = torch.arange(-500, 501, dtype=torch.int32)[:, None]
    expected = q_NK.double() * 2 ** ((old - new) / 4)
    steps = (torch.full((len(q_NK),), step) for step in (old, new))
    assert float((rescaled(q_NK, *steps) - expected).abs().max()) <= 0.5 + 1e-2


@pytest.mark.parametrize("wide", [0, 1, 5])
def test_numbers_are_remembered_in_a_byte_on_average(wide: int) -> None:
    """Two bytes for the first dimensions, half a byte for the last ones; clamped to that."""
    basis = nearest(16, wide=wide)
    limit_K = torch.tensor([2**15 - 1] * wide + [127] * (16 - 3 * wide) + [7] * (2 * wide))
    q_NK = (torch.empty(200, 16).uniform_(-1.3, 1.3) * limit_K).int()
    stored_NK = basis.remembered(q_NK)
    assert stored_NK.shape == q_NK.shape
    assert stored_NK.dtype == torch.uint8
    assert torch.equal(basis.recalled(stored_NK), q_NK.clamp(-limit_K, limit_K).int())
