"""Kernels on packed memories, and steps that follow the rms, against what they stand for."""

import pytest
import torch

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.kernels import Codes, KernelSet, load_kernels

CPU = torch.device("cpu")
REFERENCE, NUMBA = load_kernels("reference", CPU), load_kernels("numba", CPU)
NOISE = Noise(key=-12345678901234, step=2**31 + 7, row_B=torch.tensor([5, 2**40]))
SHAPES = [(1, 1, 1), (9, 4, 9), (1500, 100, 300), (5000, 64, 96), (6144, 128, 768), (2050, 4000, 7)]
Found = list[torch.Tensor]


def rows(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(2, numel, generator=torch.Generator().manual_seed(seed)) * 3


def room(numel: int, bits: int, group: int, scale: torch.dtype = torch.bfloat16) -> Codes:
    payload = torch.full((2, bits * -(-numel // 8)), 255, dtype=torch.uint8)
    return Codes(payload, torch.full((2, -(-numel // group)), torch.nan, dtype=scale), bits, group)


def filled(x: torch.Tensor, bits: int, group: int, scale: torch.dtype = torch.bfloat16) -> Codes:
    codes = room(x.shape[1], bits, group, scale)
    NUMBA.quantize(x, codes, noise=None)
    return codes


def same(one: Found, other: Found) -> bool:
    """Equal bit for bit, without being all NaN."""
    pairs = zip(one, other, strict=True)
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


def unfused(
    kernels: KernelSet, x: torch.Tensor, old: Codes, delta: Codes, noise: Noise | None
) -> Found:
    """Dequantize the memory to fp32, encode the change, quantize what the memory becomes."""
    old_values, fresh_values, out = (torch.full_like(x, torch.nan).float() for _ in range(3))
    kernels.dequantize(old, old_values)
    finite = kernels.delta_encode(x, old_values, delta, fresh_values, noise=noise)
    kernels.delta_decode(delta, old_values, fresh_values, out)
    fresh = filled(fresh_values, old.bits, old.group, old.scale_BK.dtype)
    return [*delta[:2], *fresh[:2], out, finite]


def fused(
    kernels: KernelSet, x: torch.Tensor, old: Codes, delta: Codes, noise: Noise | None
) -> Found:
    fresh, kept = (room(x.shape[1], *old[2:], old.scale_BK.dtype) for _ in range(2))
    out = torch.full_like(x, torch.nan).float()
    finite = kernels.packed_delta_encode(x, old, delta, fresh, noise=noise)
    assert torch.equal(kernels.packed_delta_decode(delta, old, kept, out), finite)
    assert same([*kept[:2]], [*fresh[:2]])
    return [*delta[:2], *fresh[:2], out, finite]


@pytest.mark.parametrize("kernels", [REFERENCE, NUMBA])
@pytest.mark.parametrize(("numel", "group", "memory_group"), SHAPES)
@pytest.mark.parametrize("memory_bits", [4, 8])
def test_packed_memories_change_as_if_unpacked(
    kernels: KernelSet, numel: int, group: int, memory_group: int, memory_bits: int
) -> None:
    old = filled(rows(numel, 1), memory_bits, memory_group)
    for turn, bits in enumerate(range(1, 9)):
        scale = (torch.bfloat16, torch.float32)[turn // 2 % 2]
        x = (rows(numel, 1) + 0.1 * rows(numel, 2)).to((torch.float32, torch.bfloat16)[turn % 2])
        noise = NOISE if bits in (2, 3, 8) else None
        expected = unfused(REFERENCE, x, old, room(numel, bits, group, scale), noise)
        found = fused(kernels, x, old, room(numel, bits, group, scale), noise)
        assert same(found, expected), f"{bits} bits"


@pytest.mark.parametrize("kernels", [REFERENCE, NUMBA])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_packed_memory_that_would_not_be_finite_is_reported(
    kernels: KernelSet, bad: float
) -> None:
    x, old = rows(5000, 0), filled(rows(5000, 1), 8, 96)
    x[1, 333] = bad
    found = fused(kernels, x, old, room(5000, 4, 64), None)
    assert found[-1].tolist() == [True, False]


def test_both_ends_hold_equal_packed_memories_after_many_steps() -> None:
    """Backends differ between the ends, and from step to step."""
    generator, numel = torch.Generator().manual_seed(3), 5 * 1024 + 300
    start = filled(torch.randn(2, numel, generator=generator), 8, 256)
    ends = [start, Codes(*(t.clone() for t in start[:2]), *start[2:])]
    error = []
    x = torch.randn(2, numel, generator=generator)
    for step in range(12):
        sender, receiver = ((REFERENCE, NUMBA), (NUMBA, REFERENCE))[step % 2]
        noise, delta = Noise(3, step, torch.tensor([1, 2])), room(numel, 3, 128)
        fresh, out = [room(numel, 8, 256) for _ in ends], torch.full_like(x, torch.nan)
        sender.packed_delta_encode(x, ends[0], delta, fresh[0], noise=noise)
        receiver.packed_delta_decode(delta, ends[1], fresh[1], out)
        assert same([*fresh[0][:2]], [*fresh[1][:2]])
        ends = fresh
        error.append(float((out - x).norm() / x.norm()))
    assert error[-1] < 0.02 < 0.2 < error[0]


@pytest.mark.parametrize("group", [1, 64, 100, 768, 5000])
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32])
def test_a_steady_rate_follows_the_rms(group: int, scale: torch.dtype) -> None:
    x = rows(5000, 1)
    x[0, 70] = 90.0
    codes = [room(5000, 4, group, scale) for _ in range(2)]
    for kernels, into in zip((REFERENCE, NUMBA), codes, strict=True):
        kernels.quantize(x, into, noise=None, rate=0.6)
    assert same([*codes[0][:2]], [*codes[1][:2]])
    rms = torch.stack([part.square().mean(1).sqrt() for part in torch.split(x, group, 1)], 1)
    assert torch.allclose(codes[0].scale_BK.float(), 0.6 * rms, rtol=1e-2)


@pytest.mark.parametrize("kernels", [REFERENCE, NUMBA])
@pytest.mark.parametrize("noise", [None, NOISE])
@pytest.mark.parametrize("rate", [1e-4, 1e-9, 1e-16])  # too many steps for 32 or 64 bits
def test_values_far_outside_the_levels_keep_their_sign(
    kernels: KernelSet, noise: Noise | None, rate: float
) -> None:
    x = torch.full((2, 2000), 1e-6)
    x[:, 5], x[:, 1700] = 1.0, -1.0
    codes, out = room(2000, 4, 2000), torch.empty_like(x)
    kernels.quantize(x, codes, noise=noise, rate=rate)
    kernels.dequantize(codes, out)
    step = codes.scale_BK[:, 0].float()
    assert torch.equal(out[:, 5], 7 * step)
    assert torch.equal(out[:, 1700], -8 * step)


@pytest.mark.parametrize("kernels", [REFERENCE, NUMBA])
@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), 1e30])
def test_a_rate_turns_bad_groups_to_nan_and_keeps_zeros(kernels: KernelSet, bad: float) -> None:
    x = rows(300, 1)
    x[0, 5], x[1, 100:200] = bad, 0.0
    codes, out = room(300, 4, 100), torch.empty_like(x)
    kernels.quantize(x, codes, noise=None, rate=1.0)
    kernels.dequantize(codes, out)
    assert out[0, :100].isnan().all()
    assert (out[1, 100:200] == 0).all()
    assert torch.isfinite(out[0, 100:]).all()
