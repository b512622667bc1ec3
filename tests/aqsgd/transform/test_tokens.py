"""What is chosen token by token: steps, and how much of the cache counts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aqsgd.transform.ends import (
    TOKENS,
    WIDTH,
    Source,
    assert_alike,
    ends,
    finish,
    send,
    visit,
)
from thinpipe.aqsgd.transform import boundary
from thinpipe.aqsgd.transform.boundary import TransformBoundary
from thinpipe.aqsgd.transform.tokens import COARSEST, SHARES, Choice, best_shares, coarseness
from thinpipe.aqsgd.transform.weights import TokenWeights

IDS = list(range(8))


def test_a_choice_is_a_symbol() -> None:
    choice = Choice(torch.arange(32) % (COARSEST + 1), torch.arange(32) // (COARSEST + 1))
    assert choice.symbols.unique().numel() == 32
    assert all(torch.equal(*pair) for pair in zip(Choice.of(choice.symbols), choice, strict=True))


def test_what_counts_of_a_cache_is_rounded_alike_for_both_signs_of_a_step() -> None:
    held_NK = torch.arange(-20, 21, dtype=torch.int32)[:, None].repeat(1, 4)
    for share, quarters in enumerate(SHARES.tolist()):
        choice = Choice(torch.zeros(41, dtype=torch.int64), torch.full((41,), share))
        exact_NK = held_NK * quarters / 4
        assert float((choice.counted(held_NK) - exact_NK).abs().max()) <= 0.5


def test_shares_follow_how_much_tokens_resemble_their_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    held_NK, fresh_NK = (torch.randn(4, 512, generator=generator) for _ in range(2))
    alike = torch.tensor([1.0, 0.75, 0.5, 0.0])[:, None]
    assert SHARES[best_shares(alike * held_NK + 0.3 * fresh_NK, held_NK)].tolist() == [4, 3, 2, 0]


def test_a_change_in_few_dimensions_counts_on_the_whole_cache() -> None:
    """Half of the cache would leave less energy, and more to send."""
    generator = torch.Generator().manual_seed(0)
    held_NK = torch.randn(1, 64, generator=generator)
    value_NK = held_NK.clone()
    value_NK[:, :3] -= 20.0 * held_NK[:, :3].sign()
    assert SHARES[best_shares(value_NK, held_NK)].tolist() == [4]


def test_steps_grow_with_massive_tokens_only() -> None:
    value_NK = torch.ones(9, 16) * torch.tensor([0.1, 1, 1, 1, 1, 2, 7, 32, 1e9])[:, None]
    assert coarseness(value_NK, None).tolist() == [0, 0, 0, 0, 0, 0, 0, 4, COARSEST]


def test_steps_shrink_where_errors_weigh_most() -> None:
    weight_N = torch.tensor([-9.0, -1.0, 0.0, 0.5, 1.0, 9.0])
    found = coarseness(torch.ones(6, 16), weight_N).tolist()
    assert found == [7, 5, 3, 2, 1, 0]


def massive(x_BTD: Tensor) -> Tensor:
    """The same with a token and a channel a thousand times the rest."""
    x_BTD = x_BTD.clone()
    x_BTD[..., 3] += 300.0  # others are about 0.3
    x_BTD[:, 0] *= 1000.0
    return x_BTD


@pytest.mark.parametrize("memory", [True, False])
def test_massive_tokens_and_channels_leave_others_as_they_are(memory: bool) -> None:
    others = [channel for channel in range(WIDTH) if channel != 3]
    found = []
    for make in (lambda x_BTD: x_BTD, massive):
        pair, source, errors = ends(memory=memory), Source(), []
        for step in range(14):
            plain_BTD = source.visit(IDS)
            out_BTD, _ = visit(*pair, make(plain_BTD), IDS, step)
            wrong_BTD = (out_BTD - make(plain_BTD))[:, 1:, others]
            errors.append(float(wrong_BTD.norm() / plain_BTD[:, 1:, others].norm()))
        found.append(errors)
    largest_BD = make(plain_BTD)[:, 0]
    assert float((out_BTD[:, 0] - largest_BD).norm() / largest_BD.norm()) < 0.01
    ratios = [a / b for a, b in zip(found[1], found[0], strict=True)]
    assert max(ratios[3:]) < 1.2
    assert max(ratios) < 1.8  # caches of the first step drop low bits


def test_gradients_that_are_half_alike_take_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same error: half an error takes a bit."""

    def bits() -> float:
        pair, random, used = ends(first_step=0.3), torch.Generator().manual_seed(0), 0.0
        x_BTD = torch.randn(8, TOKENS, WIDTH, generator=random)
        for step in range(12):
            x_BTD = 0.6 * x_BTD + 0.8 * torch.randn(x_BTD.shape, generator=random)
            out_BTD, nbytes = visit(*pair, x_BTD, IDS, step)
            error = float((out_BTD - x_BTD).norm() / x_BTD.norm())
            used += (8 * nbytes / x_BTD.numel() + math.log2(error)) * (step >= 6) / 6
        return used

    chosen = bits()
    monkeypatch.setattr(boundary, "best_shares", lambda y, _: torch.zeros(len(y), dtype=int))
    assert chosen < bits() - 0.1


def test_tokens_of_large_gradients_have_smaller_errors() -> None:
    pair, source = ends(step=1.0), Source()
    size_BT1 = torch.where(torch.arange(TOKENS) % 2 == 0, 1.0, 1 / 16)[None, :, None]
    gradient_BTD = size_BT1 * torch.ones(8, TOKENS, WIDTH)
    for step in range(6):
        x_BTD = source.visit(IDS)
        out_BTD, _ = send(*pair, x_BTD, IDS, step)
        assert pair[0].take_gradients is not None
        pair[0].take_gradients(torch.tensor(IDS), gradient_BTD)
        finish(*pair)
        assert_alike(*pair)  # the receiver knows of no gradients
    even, odd = ((out_BTD - x_BTD)[:, start::2].square().mean() for start in (0, 1))
    assert even < odd / 4


def octaves(weights: TokenWeights, *samples: int) -> Any:
    found = weights.octaves(list(samples), 2)
    return None if found is None else found.tolist()


def test_weights_count_from_the_next_step_on_if_this_one_does() -> None:
    weights = TokenWeights()
    gradient_BTD = torch.tensor([[[1.0], [16.0]]])
    weights.take(torch.tensor([5]), gradient_BTD)
    assert octaves(weights, 5) is None
    weights.finish_step(keep=False)
    assert octaves(weights, 5) is None
    weights.take(torch.tensor([5]), gradient_BTD)
    weights.finish_step(keep=True)
    assert octaves(weights, 5) == [-1.0, 1.0]
    assert octaves(weights, 7, 5) == [0.0, 0.0, -1.0, 1.0]  # nothing is known of sample 7
    again = TokenWeights()
    again.load_state_dict(weights.state_dict())
    assert octaves(again, 5) == [-1.0, 1.0]


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_gradients_that_say_nothing_weigh_like_others(value: float) -> None:
    weights = TokenWeights()
    weights.take(torch.tensor([1]), torch.tensor([[[value], [2.0]]]))
    weights.finish_step(keep=True)
    assert octaves(weights, 1) == [0.0, 0.0]


def test_massive_tokens_do_not_decide_the_basis() -> None:
    """One token of 48 has all but a thousandth of the energy, and lies elsewhere."""
    found: list[TransformBoundary] = []
    for make in (lambda x_BTD: x_BTD, massive):
        pair, source = ends(), Source()
        for step in range(8):
            visit(*pair, make(source.visit(IDS)), IDS, step)
        found.append(pair[0])
    plain, other = (end.learned.basis.matrix for end in found)
    rest = [channel for channel in range(WIDTH) if channel != 3]
    shared = (plain[rest, :4].T @ other[rest, :8]).square().sum() / 4
    assert float(shared) > 0.7
