"""Bases and steps: nearly exact in floats, and exact in whole numbers however they are computed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from thinpipe.aqsgd.transform.basis import (
    Basis,
    exact_dimensions,
    remembered_nbytes,
    rescaled,
    step_index,
    step_sizes,
    turned,
)


def orthonormal(width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(width, width, generator=generator))[0]


def nearest(width: int, seed: int = 0, shift: int = 0) -> Basis:
    shift_K = torch.full((width,), shift, dtype=torch.uint8)
    return Basis.nearest(orthonormal(width, seed), shift_K)


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
    size = float(step_sizes(torch.tensor(index)))
    assert size == pytest.approx(2 ** (index / 4), rel=1e-6)
    assert step_index(size) == index


@pytest.mark.parametrize(("old", "new"), [(0, 0), (4, 0), (0, 4), (-7, 3), (2, -9)])
def test_numbers_in_other_steps_are_rounded_to_nearest(old: int, new: int) -> None:
    q_NK = torch.arange(-500, 501, dtype=torch.int32)[:, None]
    expected = q_NK.double() * 2 ** ((old - new) / 4)
    steps = (torch.full((len(q_NK),), step) for step in (old, new))
    assert float((rescaled(q_NK, *steps) - expected).abs().max()) <= 0.5 + 1e-2


@pytest.mark.parametrize("shift", [0, 1, 5])
@pytest.mark.parametrize("largest", [100, 2**12, 2**27])
def test_numbers_are_remembered_in_a_byte_however_large_they_are(shift: int, largest: int) -> None:
    """To half of what as many low bits stand for, and exactly where none need go."""
    basis = nearest(16, shift=shift)
    q_NK = torch.randint(-largest, largest + 1, (200, 16), dtype=torch.int32)
    q_NK[::2] //= 50
    q_NK[0] = 0
    stored_NW, more_N = basis.remembered(q_NK)
    assert stored_NW.shape == (200, remembered_nbytes(16))
    assert stored_NW.dtype == torch.uint8
    again_NK = basis.recalled(stored_NW, more_N)
    error_NK = (again_NK - q_NK).abs().double()
    exact = exact_dimensions(16)
    assert bool((error_NK[:, :exact] == 0)[q_NK[:, :exact].abs() < 2**23].all())
    unit_N = 2.0 ** (shift + more_N)
    assert bool((error_NK[:, exact:].amax(1) <= unit_N).all())
    assert float((error_NK[:, exact:] / unit_N[:, None]).square().mean()) <= 1 / 6  # 1 / 12, ties
    peak_N = q_NK[:, exact:].abs().amax(1)
    assert bool((unit_N <= (peak_N / 63).clamp_min(2.0**shift)).all())
