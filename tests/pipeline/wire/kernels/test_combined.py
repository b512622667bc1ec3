"""Steps that follow the rms, under several backends."""

import pytest
import torch

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.kernels import Codes, KernelSet, load_kernels

CPU = torch.device("cpu")
REFERENCE, NUMBA = load_kernels("reference", CPU), load_kernels("numba", CPU)
NOISE = Noise(key=-12345678901234, step=2**31 + 7, row_B=torch.tensor([5, 2**40]))
Found = list[torch.Tensor]


def rows(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(2, numel, generator=torch.Generator().manual_seed(seed)) * 3


def room(numel: int, bits: int, group: int, scale: torch.dtype = torch.bfloat16) -> Codes:
    payload = torch.full((2, bits * -(-numel // 8)), 255, dtype=torch.uint8)
    return Codes(payload, torch.full((2, -(-numel // group)), torch.nan, dtype=scale), bits, group)


def same(one: Found, other: Found) -> bool:
    """Equal bit for bit, without being all NaN."""
    pairs = zip(one, other, strict=True)
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in pairs
    )


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
