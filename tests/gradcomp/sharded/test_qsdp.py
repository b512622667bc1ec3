"""QSDP's quantizers: what they promise on average, and for every value."""

from typing import Any

import pytest
import torch
from torch import Tensor

from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.gradcomp.sharded.qsdp import Learned, Shifted, is_kept, value_codec
from thinpipe.gradcomp.sharded.segments import Segmented
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Codec, Noise

BUCKET = 64
ROUNDINGS = ("shift", "stochastic", "nearest", "learned")


def noise(step: int) -> Noise:
    return Noise(5, step, torch.tensor([0]))


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(1, numel, generator=torch.Generator().manual_seed(seed))


def coded(codec: Codec, x_BN: Tensor, step: int = 0) -> Tensor:
    wire_BW = torch.zeros(1, codec.capacity(x_BN.shape[1]), dtype=torch.uint8)
    assert codec.encode(x_BN, wire_BW, noise=noise(step)) == wire_BW.shape[1]
    out_BN = torch.full_like(x_BN, torch.nan)
    codec.decode(wire_BW, out_BN)
    return out_BN


def steps(x_BN: Tensor, bits: int) -> Tensor:
    """The step of each value's bucket."""
    x_KG = x_BN.view(-1, BUCKET)
    step_K = (x_KG.amax(1) - x_KG.amin(1)) / (2**bits - 1)
    return step_K.repeat_interleave(BUCKET)[None]


@pytest.mark.parametrize(("rounding", "bits"), [("shift", 3), ("stochastic", 2)])
def test_means_over_4000_draws_are_unbiased(rounding: str, bits: int) -> None:
    x_BN, draws = normal(BUCKET), 4000
    codec = value_codec(bits, rounding, BUCKET)  # type: ignore[arg-type]
    found = coded(codec, x_BN.repeat(1, draws)).view(draws, BUCKET).double()
    deviation_N = found.std(0) / draws**0.5
    allowed_N = 4 * deviation_N + 2.0**-15 * steps(x_BN, bits)[0]  # of 16-bit random numbers
    assert bool(((found.mean(0) - x_BN[0]).abs() <= allowed_N).float().mean() > 0.99)


def test_a_shift_has_the_error_of_a_lattice_for_every_value() -> None:
    x_BN, bits, draws = normal(BUCKET), 4, 4000
    found = coded(Shifted(bits, BUCKET), x_BN.repeat(1, draws)).view(draws, BUCKET)
    ratio_N = (found - x_BN).square().mean(0) / (steps(x_BN, bits)[0].square() / 12)
    assert float(ratio_N.mean()) == pytest.approx(1, abs=0.02)
    assert float((ratio_N - 1).abs().max()) < 0.1


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_errors_are_at_most_a_step(bits: int) -> None:
    x_BN = normal(8 * BUCKET)
    error_BN = (coded(Shifted(bits, BUCKET), x_BN) - x_BN).abs() / steps(x_BN, bits)
    assert float(error_BN.max()) <= 0.5001


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("numel", [1, BUCKET, 3 * BUCKET + 5])
def test_what_the_sender_takes_them_to_see_is_what_they_decode(rounding: str, numel: int) -> None:
    for bits in (2, 5, 8):
        codec = value_codec(bits, rounding, BUCKET)  # type: ignore[arg-type]
        x_BN = normal(numel)
        wire_BW = torch.zeros(1, codec.capacity(numel), dtype=torch.uint8)
        seen_BN, out_BN = torch.full_like(x_BN, torch.nan), torch.full_like(x_BN, torch.nan)
        codec.encode(x_BN, wire_BW, seen_BN, noise=noise(3))
        codec.decode(wire_BW, out_BN)
        assert torch.equal(seen_BN, out_BN)
        in_place_BN = x_BN.clone()
        codec.encode(in_place_BN, wire_BW, in_place_BN, noise=noise(3))
        assert torch.equal(in_place_BN, out_BN)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_constant_bucket_is_exact_and_what_is_not_finite_shows(rounding: str) -> None:
    codec = value_codec(4, rounding, BUCKET)  # type: ignore[arg-type]
    x_BN = torch.full((1, 3 * BUCKET), 0.25)
    if rounding in ("shift", "learned"):
        assert torch.equal(coded(codec, x_BN), x_BN)
    assert torch.equal(coded(codec, torch.zeros_like(x_BN)), torch.zeros_like(x_BN))
    for fault in (torch.nan, torch.inf, -torch.inf):
        x_BN[0, BUCKET + 1] = fault
        out_BN = coded(codec, x_BN)
        assert not bool(out_BN[0, BUCKET : 2 * BUCKET].isfinite().any())
        assert bool(out_BN[0, :BUCKET].isfinite().all())
        assert bool(out_BN[0, 2 * BUCKET :].isfinite().all())


def test_bytes_are_those_of_the_formula() -> None:
    numel, bits = 3 * BUCKET + 5, 6
    codes = bits * -(-numel // 8)
    assert Shifted(bits, BUCKET).capacity(numel) == 8 * 4 + codes
    assert Learned.uniform(bits, BUCKET).capacity(numel) == (4 << bits) + 8 * 4 + codes
    assert value_codec(bits, "nearest", BUCKET).capacity(numel) == 4 * 4 + codes


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_learned_levels_have_smaller_errors_than_equal_ones(bits: int) -> None:
    x_BN = normal(16 * 1024)
    learned = Learned.uniform(bits, 1024)
    before = float((coded(learned, x_BN) - x_BN).square().mean())
    for _ in range(30):
        learned.learn(x_BN)
    after = float((coded(learned, x_BN) - x_BN).square().mean())
    assert after < {2: 0.35, 3: 0.6, 4: 0.75}[bits] * before
    assert bool((learned.level_L.diff() > 0).all())


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_bucket_beyond_the_row_is_the_row(rounding: Any) -> None:
    """Filled up, it would take 4 TB."""
    x_BN = normal(2048)
    whole, beyond = (coded(value_codec(4, rounding, size), x_BN) for size in (2048, 10**12))
    assert torch.equal(whole, beyond)


def test_vectors_and_small_tensors_are_kept() -> None:
    config = ShardsConfig(method="qsdp", keep_below=100)
    assert is_kept(torch.Size([5000]), config)
    assert is_kept(torch.Size([9, 11]), config)
    assert not is_kept(torch.Size([10, 10]), config)


def test_segments_are_coded_apart() -> None:
    x_BN = normal(2 * BUCKET + 10)
    shift = Shifted(2, BUCKET)
    codec = Segmented([BUCKET, 10, BUCKET], [shift, Cast("fp32"), shift])
    assert codec.capacity(x_BN.shape[1]) == 2 * shift.capacity(BUCKET) + 40
    out_BN = coded(codec, x_BN)
    assert torch.equal(out_BN[:, BUCKET : BUCKET + 10], x_BN[:, BUCKET : BUCKET + 10])
    same_BN = torch.cat([x_BN[:, :BUCKET], x_BN[:, :10], x_BN[:, :BUCKET]], 1)
    out_BN = coded(codec, same_BN)
    assert not torch.equal(out_BN[:, :BUCKET], out_BN[:, -BUCKET:])  # other random numbers
