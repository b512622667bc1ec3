"""Coefficients: what is decoded is what was encoded, in about as many bits as their entropy."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinpipe.aqsgd.transform import coefficients, logistic
from thinpipe.aqsgd.transform.coefficients import LARGEST, SCALES, Coded
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.coding.rans import Tables

EVEN = Tables(torch.full((1, SCALES), 4096 // SCALES))


def coded(q_NK: Tensor, model_K: Tensor) -> tuple[Tensor, Coded]:
    wire = torch.full((coefficients.capacity(*q_NK.shape),), 0xEE, dtype=torch.uint8)
    used, result = coefficients.encode(q_NK, model_K, EVEN, wire)
    assert bool((wire[used:] == 0xEE).all())
    return wire[:used], result


def drawn(scale_NK: Tensor, seed: int = 0) -> Tensor:
    """Logistic numbers of these mean magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    uniform_NK = torch.rand(scale_NK.shape, generator=generator, dtype=torch.float64)
    value_NK = scale_NK / (2 * math.log(2)) * torch.logit(uniform_NK, eps=1e-12)
    return value_NK.round().clamp(-LARGEST, LARGEST).int()


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 20),
    dimensions=st.integers(1, 12),
    exponents=st.tuples(st.floats(-6, 14), st.floats(-6, 14)),
    seed=st.integers(0, 2**31),
)
def test_what_is_decoded_is_what_was_encoded(
    tokens: int, dimensions: int, exponents: tuple[float, float], seed: int
) -> None:
    """Whatever the magnitudes, and however wrong the models."""
    generator = torch.Generator().manual_seed(seed)
    low, high = sorted(exponents)
    scale_NK = 2 ** torch.empty(tokens, dimensions).uniform_(low, high, generator=generator)
    q_NK = drawn(scale_NK, seed)
    model_K = torch.randint(logistic.MODELS, (dimensions,), generator=generator)
    wire, sent = coded(q_NK, model_K)
    received = coefficients.decode(wire, tokens, model_K, EVEN)
    for ours, theirs in zip(sent, received, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(received.q_NK, q_NK)


@pytest.mark.parametrize("extreme", [-LARGEST, LARGEST])
def test_extremes_take_no_more_than_two_bytes_each(extreme: int) -> None:
    q_NK = torch.full((30, 8), extreme, dtype=torch.int32)
    model_K = torch.zeros(8, dtype=torch.int64)
    wire, _ = coded(q_NK, model_K)
    assert wire.numel() <= coefficients.capacity(30, 8)
    assert torch.equal(coefficients.decode(wire, 30, model_K, EVEN).q_NK, q_NK)


@pytest.mark.parametrize("scale", [0.1, 0.3, 1.0, 5.0, 100.0])
def test_bits_are_near_the_entropy(scale: float) -> None:
    """Dimensions and tokens of different scales; models that are right for the dimensions."""
    model_K = (20 + 4 * math.log2(scale) + torch.linspace(-8, 8, 64)).round().long()
    model_K.clamp_(0, logistic.MODELS - 1)
    token_N1 = 2 ** (torch.randint(-2, 3, (1024, 1)) / 2)
    scale_NK = 2 ** ((model_K - 20) / 4) * token_N1
    q_NK = drawn(scale_NK)
    wire, _ = coded(q_NK, model_K)
    size_NK, wide_NK = q_NK.abs().double(), scale_NK.double() / (2 * math.log(2))
    above_NK, below_NK = (torch.sigmoid((size_NK + edge) / wide_NK) for edge in (0.5, -0.5))
    ideal = -(above_NK - below_NK).log2().sum() / 8
    scales_nbytes = 1024 * 5 / 8
    assert wire.numel() <= 1.03 * float(ideal) + scales_nbytes + 150


def test_damage_ends_in_an_error_or_in_other_numbers() -> None:
    model_K, dice, caught = torch.full((16,), 22), random.Random(0), 0
    wire, _ = coded(drawn(torch.full((64, 16), 1.5)), model_K)
    for _ in range(300):
        hurt = torch.cat([wire, torch.zeros(3, dtype=torch.uint8)])
        hurt[dice.randrange(len(wire))] ^= dice.randrange(1, 256)
        try:
            coefficients.decode(hurt[: len(wire) + dice.randint(-3, 3)], 64, model_K, EVEN)
        except CodingError:
            caught += 1
    assert caught > 250


@pytest.mark.parametrize("length", [0, 3, 11])
def test_too_short_a_message_is_named(length: int) -> None:
    with pytest.raises(CodingError, match=f"coefficients of {length} bytes"):
        coefficients.decode(torch.zeros(length, dtype=torch.uint8), 4, torch.zeros(4).long(), EVEN)
