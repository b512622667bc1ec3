"""Laws of the stateless codec: tiles, some rotated, that trade bits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.wire.codecs import bursts, rows, through, using
from thinpipe.pipeline.wire.codec import Cached
from thinpipe.pipeline.wire.hadamard import Hadamard
from thinpipe.pipeline.wire.kernels import Backend
from thinpipe.pipeline.wire.uniform import Uniform

BITS = range(2, 8)


def error(codec: Hadamard | Uniform, x: torch.Tensor) -> float:
    return float((through(codec, x)[0] - x).norm() / x.norm())


@pytest.mark.parametrize("bits", BITS)
def test_nbytes_is_maps_scales_and_codes(bits: int) -> None:
    assert Hadamard(bits).capacity(64 * 64) == 3 * 8 + 2 * 64 + 8 * bits * 64
    assert Hadamard(bits).capacity(65) == 3 * 1 + 2 * 2 + 8 * bits * 2
    assert Hadamard(bits).capacity(0) == 0


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
