"""Laws of the stateless codec: tiles, some rotated, that trade bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.wire.backends import using
from thinpipe.pipeline.wire.codec import Cached
from thinpipe.pipeline.wire.hadamard import Hadamard
from thinpipe.pipeline.wire.kernels import Backend
from thinpipe.pipeline.wire.uniform import Uniform

BITS = range(2, 8)


def rows(count: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))


def bursts(count: int, numel: int, seed: int = 0) -> torch.Tensor:
    """Stretches of very different size, as gradients have them, and some outliers."""
    x = rows(count, numel, seed)
    size = torch.exp(3 * rows(count, -(-numel // 80), seed + 1)).repeat_interleave(80, 1)
    x = x * size[:, :numel]
    x[:, ::511] *= 50
    return x


def through(codec: Hadamard | Uniform, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the peer decodes and what the sender expects it to."""
    wire = torch.full((x.shape[0], codec.capacity(x.shape[1])), 0xAA, dtype=torch.uint8)
    seen, out = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    codec.encode(x, wire, seen, noise=None)
    codec.decode(wire, out)
    return out, seen


def error(codec: Hadamard | Uniform, x: torch.Tensor) -> float:
    return float((through(codec, x)[0] - x).norm() / x.norm())


@pytest.mark.parametrize("bits", BITS)
def test_nbytes_is_maps_scales_and_codes(bits: int) -> None:
    assert Hadamard(bits).capacity(64 * 64) == 3 * 8 + 2 * 64 + 8 * bits * 64
    assert Hadamard(bits).capacity(65) == 3 * 1 + 2 * 2 + 8 * bits * 2
    assert Hadamard(bits).capacity(0) == 0


@given(
    bits=st.integers(2, 7),
    numel=st.integers(1, 3000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_any_size_and_format_round_trips(
    bits: int, numel: int, dtype: torch.dtype, seed: int
) -> None:
    x = bursts(3, numel, seed).to(dtype)
    out, seen = through(Hadamard(bits), x)
    assert torch.equal(out, seen)
    # a tile's step is at most its peak / (2^(b-2) + 0.5), rotated or not; at 1 bit it is the peak
    # and half a tile may lose its sign
    assert (out.float() - x.float()).norm() <= x.float().norm() * (1.2 if bits == 2 else 1.0)


@given(exponent=st.integers(-40, 20), bits=st.integers(2, 7))
@settings(max_examples=20)
def test_decoding_scales_with_the_input(exponent: int, bits: int) -> None:
    x, codec, factor = bursts(2, 1000), Hadamard(bits), 2.0**exponent
    assert torch.equal(through(codec, x * factor)[0], through(codec, x)[0] * factor)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (0, 0)])
def test_no_rows_and_no_values_are_fine(shape: tuple[int, int]) -> None:
    out, seen = through(Hadamard(3), torch.empty(shape))
    assert out.shape == seen.shape == shape


@pytest.mark.parametrize("bits", BITS)
def test_zero_rows_stay_zero(bits: int) -> None:
    assert (through(Hadamard(bits), torch.zeros(2, 200))[0] == 0).all()


@pytest.mark.parametrize("magnitude", [1e-38, 1e30, 3e38])
def test_extreme_magnitudes_stay_finite(magnitude: float) -> None:
    x = rows(1, 640).clamp(-1, 1) * magnitude
    assert torch.isfinite(through(Hadamard(4), x)[0]).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_turns_its_tile_to_nan_and_no_other(bad: float) -> None:
    x = rows(2, 256)
    x[1, 70] = bad
    out, seen = through(Hadamard(4), x)
    assert out[1, 64:128].isnan().all()
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(out[1, :64]).all()
    assert torch.isfinite(out[1, 128:]).all()
    assert torch.equal(out.nan_to_num(9.0), seen.nan_to_num(9.0))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, codec = bursts(5, 700), Hadamard(3)
    alone = torch.cat([through(codec, row.unsqueeze(0))[0] for row in x])
    assert torch.equal(through(codec, x)[0], alone)


def test_one_outlier_is_spread_instead_of_hiding_its_tile() -> None:
    x = rows(4, 4096)
    x[:, ::64] += 25.0
    assert error(Hadamard(4), x) < 0.4 * error(Uniform(4, 64), x)


def test_bits_move_to_large_tiles() -> None:
    """Two sizes of tiles 8 apart: a bit more for the large ones halves the error, less 1/64."""
    x = rows(2, 8192)
    x[:, ::2] = 0  # rotation is of no use to what comes next
    x = torch.where(torch.arange(8192) // 64 % 2 == 0, x.sign(), x.sign() / 8)
    x = x * torch.linspace(0.5, 1.0, 8192)
    assert error(Hadamard(5), x) < 0.6 * error(Uniform(5, 64), x)


@pytest.mark.parametrize("bits", BITS)
def test_no_tile_is_worse_off_for_its_size(bits: int) -> None:
    """Even tiles: nothing to trade, so the error is at most that of plain groups."""
    x = rows(4, 64 * 64)
    assert error(Hadamard(bits), x) <= error(Uniform(bits, 64), x)


def test_visiting_the_same_value_again_contracts_the_error() -> None:
    x = bursts(1, 4096)
    for bits, rate in ((2, 0.8), (4, 0.3)):
        memory, codec = torch.zeros_like(x), Hadamard(bits)
        for _ in range(6):
            before = (x - memory).norm()
            memory += through(codec, x - memory)[0]
            assert (x - memory).norm() <= rate * before


@pytest.mark.parametrize(
    ("options", "message"),
    [({"bits": 1}, "bits = 1: use 2 to 7"), ({"bits": 8}, "bits = 8")],
)
def test_wrong_options_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hadamard(**options)


@given(
    bits=st.integers(2, 7),
    numel=st.integers(1, 1500),
    memory=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_changes_are_differences_and_an_addition_in_fp32(
    bits: int, numel: int, memory: torch.dtype, seed: int
) -> None:
    """At both ends and with either backend, also where a value is not finite."""
    before_BN, x_BN = bursts(2, numel, seed).to(memory), bursts(2, numel, seed + 7)
    x_BN[1, numel // 2] = math.nan if seed % 3 == 0 else x_BN[1, numel // 2]
    found = []
    backends: tuple[Backend, ...] = ("reference", "numba")
    for name in backends:
        codec = Hadamard(bits)
        wire = torch.full((2, codec.capacity(numel)), 0xAA, dtype=torch.uint8)
        kept, fresh = torch.empty_like(before_BN), torch.empty_like(before_BN)
        out, change = torch.empty(2, numel), torch.empty(2, numel)
        with using(name):
            finite = codec.encode_change(x_BN, Cached(before_BN, kept), wire, noise=None)
            assert torch.equal(finite, codec.decode_change(wire, Cached(before_BN, fresh), out))
            codec.decode(wire, change)
        assert finite.tolist() == torch.isfinite(out).all(1).tolist()
        parts = (kept, fresh, out, (before_BN.float() + change))
        found.append([wire, *(part.float().nan_to_num(9.0) for part in parts)])
        assert torch.equal(found[-1][1], found[-1][2])
        assert torch.equal(found[-1][3], found[-1][4])
        assert torch.equal(found[-1][4].to(memory).float(), found[-1][1])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
