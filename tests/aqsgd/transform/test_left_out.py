"""Directions that are left out (`dimensions` below 1): which, when, and what of them is lost."""

import pytest
import torch
from torch import Tensor

from tests.aqsgd.transform.ends import TOKENS, WIDTH, ends, visit
from thinpipe.aqsgd.transform.boundary import TransformBoundary
from thinpipe.aqsgd.transform.config import TransformConfig

KEPT = WIDTH // 4


def visits(energy_D: Tensor, step: int) -> Tensor:
    """Samples with so much in each of fixed directions, which change by a tenth."""
    fixed = torch.Generator().manual_seed(0)
    turn_DD = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=fixed))[0]
    base_BTD = torch.randn(8, TOKENS, WIDTH, generator=fixed)
    fresh = torch.Generator().manual_seed(step)
    change_BTD = 0.1 * torch.randn(8, TOKENS, WIDTH, generator=fresh)
    return (base_BTD + change_BTD) * energy_D.sqrt() @ turn_DD.T


def follow(
    pair: tuple[TransformBoundary, TransformBoundary], energies: list[Tensor]
) -> list[float]:
    found = []
    for step, energy_D in enumerate(energies):
        x_BTD = visits(energy_D, step)
        out_BTD, _ = visit(*pair, x_BTD, list(range(8)), step)
        found.append(float((out_BTD - x_BTD).square().sum() / x_BTD.square().sum()))
    return found


def test_what_is_in_the_least_directions_is_lost_and_nothing_else() -> None:
    energy_D = torch.tensor([1.0] * KEPT + [1e-3] * (WIDTH - KEPT))
    pair = ends(dimensions=KEPT / WIDTH, step=0.01)
    error = follow(pair, [energy_D] * 8)
    assert pair[0].learned.basis.dimensions == KEPT
    left_out = float(energy_D[KEPT:].sum() / energy_D.sum())
    assert error[-1] == pytest.approx(left_out, rel=0.1)
    assert error[-1] > 20 * follow(ends(step=0.01), [energy_D] * 8)[-1]


@pytest.mark.parametrize("kept", [KEPT, WIDTH // 2])
def test_another_basis_comes_when_other_directions_have_grown(kept: int) -> None:
    before_D = torch.tensor([1.0] * kept + [1e-3] * (WIDTH - kept))
    pair = ends(dimensions=kept / WIDTH)
    error = follow(pair, [before_D] * 8 + [before_D.flip(0)] * 12)
    assert error[8] > 0.5
    assert error[-1] < 0.1


def test_what_does_not_change_in_kind_is_left_as_it_is() -> None:
    """Neither more is lost with time, nor are other bases sent, nor steps made coarser."""
    energy_D = torch.logspace(0, -4, WIDTH)
    pair = ends(dimensions=0.5)
    error = follow(pair, [energy_D] * 36)
    assert pair[0].learned.version == 1
    least = float(energy_D[WIDTH // 2 :].sum() / energy_D.sum())
    assert max(error[4:]) < 1.2 * least


def test_a_resumed_run_may_send_more_or_fewer_directions() -> None:
    energy_D = torch.logspace(0, -2, WIDTH)
    for before, after in ((0.5, 1.0), (1.0, 0.5)):
        old, new = ends(dimensions=before), ends(dimensions=after)
        follow(old, [energy_D] * 12)
        for left, right in zip(old, new, strict=True):
            right.load_state_dict(left.state_dict())
        follow(new, [energy_D] * 8)
        assert new[0].learned.basis.dimensions == after * WIDTH


def test_a_largest_step_that_would_do_nothing_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"largest_step = 0.2 bounds .* leave it out"):
        TransformConfig(largest_step=0.2, memory=False)
