"""Laws of uniform quantization."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.uniform import Uniform

BITS = range(1, 9)


def rows(count: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))


def through(
    codec: Uniform, x: torch.Tensor, noise: Noise | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the peer decodes and what the sender expects it to."""
    wire = torch.full((x.shape[0], codec.capacity(x.shape[1])), 0xAA, dtype=torch.uint8)
    seen, out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    codec.encode(x, wire, seen, noise=noise)
    codec.decode(wire, out)
    return out, seen


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


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0, 0)])
def test_no_rows_and_no_values_are_fine(shape: tuple[int, int]) -> None:
    out, seen = through(Uniform(3, 64), torch.empty(shape))
    assert out.shape == seen.shape == shape


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_rows_stay_zero(bits: int) -> None:
    out, seen = through(Uniform(bits, 64), torch.zeros(2, 200))
    assert (out == 0).all()
    assert (seen == 0).all()


@given(
    bits=st.integers(1, 8),
    numel=st.integers(1, 2100),
    group=st.integers(1, 300),
    scale_dtype=st.sampled_from(["bf16", "fp32"]),
)
@settings(max_examples=60)
def test_seen_is_what_the_peer_decodes(bits: int, numel: int, group: int, scale_dtype: Any) -> None:
    x = rows(2, numel, bits)
    out, seen = through(Uniform(bits, group, scale_dtype=scale_dtype), x)
    assert torch.equal(out, seen)
    assert (out - x).norm() <= x.norm()


@given(exponent=st.integers(-40, 20), bits=st.integers(1, 8))
@settings(max_examples=20)
def test_decoding_scales_with_the_input(exponent: int, bits: int) -> None:
    x, codec = rows(2, 512), Uniform(bits, 64)
    factor = 2.0**exponent
    assert torch.equal(through(codec, x * factor)[0], through(codec, x)[0] * factor)


@pytest.mark.parametrize("magnitude", [1e-38, 1e30])
def test_extreme_magnitudes_stay_finite(magnitude: float) -> None:
    out, _ = through(Uniform(4, 64), rows(1, 128).clamp(-4, 4) * magnitude)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_a_bad_value_turns_its_group_to_nan_and_no_other(bad: float, bits: int) -> None:
    x = rows(2, 256)
    x[1, 70] = bad
    out, seen = through(Uniform(bits, 64), x)
    assert out[1, 64:128].isnan().all()
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(out[1, :64]).all()
    assert torch.isfinite(out[1, 128:]).all()
    assert torch.equal(out.nan_to_num(9.0), seen.nan_to_num(9.0))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    codec, x = Uniform(3, 8), rows(5, 80)
    together, _ = through(codec, x)
    alone = torch.cat([through(codec, row.unsqueeze(0))[0] for row in x])
    assert torch.equal(together, alone)


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


def test_visiting_the_same_value_again_contracts_the_error() -> None:
    """AQ-SGD's recursion on a fixed activation with outliers (Assumption on c_Q, section 3)."""
    x = rows(1, 4096)
    x[0, ::500] *= 30
    for bits, rate in ((2, 0.75), (4, 0.3)):
        memory = torch.zeros_like(x)
        codec = Uniform(bits, 64)
        for _ in range(6):
            before = (x - memory).norm()
            memory += through(codec, x - memory)[0]
            assert (x - memory).norm() <= rate * before or (x - memory).norm() < 1e-5 * x.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0, "group": 64}, "bits = 0"),
        ({"bits": 9, "group": 64}, "bits = 9"),
        ({"bits": 4, "group": 0}, "group = 0"),
        ({"bits": 1, "group": 64, "stochastic": True}, "1 bit"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Uniform(**options)


def test_stochastic_without_a_key_is_rejected() -> None:
    with pytest.raises(ValueError, match="needs noise"):
        through(Uniform(4, 64, stochastic=True), rows(1, 64))
