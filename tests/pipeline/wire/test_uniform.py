"""Laws of uniform quantization."""

import math

import pytest
import torch

from tests.pipeline.wire.codecs import rows, through
from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.uniform import Uniform

BITS = range(1, 9)


@pytest.mark.parametrize("bits", BITS)
def test_nbytes_is_codes_and_scales(bits: int) -> None:
    assert Uniform(bits, 16).capacity(16 * 10) == bits * 20 + 2 * 10
    assert Uniform(bits, 16, scale_dtype="fp32").capacity(160) == bits * 20 + 40
    assert Uniform(bits, 64).capacity(1001) == bits * 126 + 2 * 16
    assert Uniform(bits, 2000).capacity(1001) == bits * 126 + 2


@pytest.mark.parametrize("bits", range(3, 9))
def test_every_value_lands_within_half_a_step(bits: int) -> None:
    x = rows(4, 1024) * 3
    x[0, :2] = torch.tensor([7.0, -7.0])  # both extremes equally far
    out, _ = through(Uniform(bits, 1024, scale_dtype="fp32"), x)
    half = 2 ** (bits - 1)
    step = torch.maximum(
        x.abs().amax(1) / (half + 0.5), torch.minimum(x.amax(1), -x.amin(1)) / (half - 0.5)
    )
    assert ((out - x).abs() <= step[:, None] * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_few_bits_hold_the_largest_magnitude_exactly(bits: int, sign: float) -> None:
    x = rows(1, 256)
    x[0, 17] = sign * 8.0
    out, _ = through(Uniform(bits, 256), x)
    assert out[0, 17] == sign * 8.0


@pytest.mark.parametrize("bits", BITS)
def test_all_codes_are_used_and_zero_is_one_of_them(bits: int) -> None:
    x = torch.linspace(-1, 1 - 2.0 ** (1 - bits), 4096).unsqueeze(0)
    out, _ = through(Uniform(bits, 4096), x)
    assert out.unique().numel() == 2**bits
    assert (out == 0).any()


@pytest.mark.parametrize("bits", [2, 3, 6])
def test_stochastic_rounding_is_unbiased_to_the_edge_of_the_range(bits: int) -> None:
    draws = 20_000
    x = torch.tensor([[-1.0, 1.0, 0.3, -0.77, 0.01, 0.99, -0.5, 0.0]])
    noise = Noise(key=5, step=1, row_B=torch.arange(draws))
    out, _ = through(Uniform(bits, 8, stochastic=True), x.expand(draws, -1), noise)
    error = (out - x).mean(0)
    spread = out.std(0) / math.sqrt(draws)
    assert (error.abs() <= 4.5 * spread + 2e-5).all()


def test_noise_is_keyed_and_leaves_global_state_alone() -> None:
    x, codec = rows(2, 3000), Uniform(2, 128, stochastic=True)
    state = torch.random.get_rng_state()
    ids = torch.tensor([7, 2**40])
    first = through(codec, x, Noise(1, 2, ids))[0]
    assert torch.equal(first, through(codec, x, Noise(1, 2, ids))[0])
    for other in (Noise(3, 2, ids), Noise(1, 3, ids), Noise(1, 2, ids + 1), Noise(1 << 33, 2, ids)):
        assert not torch.equal(first, through(codec, x, other)[0])
    assert torch.equal(state, torch.random.get_rng_state())


def test_stochastic_without_a_key_is_rejected() -> None:
    with pytest.raises(ValueError, match="needs noise"):
        through(Uniform(4, 64, stochastic=True), rows(1, 64))
