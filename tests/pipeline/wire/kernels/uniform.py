"""What kernels of uniform quantization write, and where it is not what the reference writes."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import Codes, load_kernels

CPU = torch.device("cpu")


class Case(NamedTuple):
    """Two rows of values, and how they are quantized; strided: not side by side."""

    bits: int
    numel: int
    group: int
    dtype: torch.dtype = torch.float32
    memory_dtype: torch.dtype = torch.float32
    scale: torch.dtype = torch.bfloat16
    noise: Noise | None = None
    outlier: float = 1e-30
    strided: bool = False


def rows(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, numel, generator=torch.Generator().manual_seed(seed)) * 3


def room(
    numel: int,
    bits: int,
    group: int,
    scale: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
    poison: int = 255,
) -> Codes:
    payload = torch.full((2, bits * -(-numel // 8)), poison, dtype=torch.uint8, device=device)
    scales = torch.full((2, -(-numel // group)), torch.nan, dtype=scale, device=device)
    return Codes(payload, scales, bits, group)


def results(name: Any, device: torch.device, case: Case) -> list[torch.Tensor]:
    """Everything the kernels write for a case."""
    kernels, numel, noise = load_kernels(name, device), case.numel, case.noise
    if noise is not None:
        noise = replace(noise, row_B=noise.row_B.to(device))
    x = rows(numel, case.bits).to(case.dtype)
    x[1, numel // 2 :: 977] = case.outlier
    x = (x.t().contiguous().t() if case.strided else x).to(device)
    memory = (rows(numel, 99) / 3).to(device, case.memory_dtype)
    plain, delta = (room(numel, case.bits, case.group, case.scale, device) for _ in range(2))
    out, value = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    fresh, kept = torch.full_like(memory, torch.nan), torch.full_like(memory, torch.nan)
    kernels.quantize(x, plain, noise=noise)
    kernels.dequantize(plain, out)
    finite = kernels.delta_encode(x, Cached(memory, fresh), delta, noise=noise)
    kernels.delta_decode(delta, Cached(memory, kept), value)
    kernels.delta_encode(x, Cached(memory, memory), delta, noise=noise)  # in place
    found = [*plain[:2], out, *delta[:2], fresh, kept, value, finite, memory]
    return [tensor.cpu() for tensor in found]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, with every NaN alike: only the reference's NaNs in values are torch's own."""
    if tensor.is_floating_point():
        tensor = tensor.where(~tensor.isnan(), torch.tensor(torch.nan, dtype=tensor.dtype))
    return tensor.contiguous().view(torch.uint8)


def differing(cases: list[Case], name: Any, device: torch.device = CPU) -> list[str]:
    """Cases and results that are not the reference's on a CPU."""
    return [
        f"{case}: result {i}"
        for case in cases
        for i, (expected, got) in enumerate(
            zip(results("reference", CPU, case), results(name, device, case), strict=True)
        )
        if not torch.equal(bits_of(expected), bits_of(got))
    ]


def keeps_nan(
    name: Any, device: torch.device, memory_dtype: torch.dtype, dtype: torch.dtype
) -> bool:
    """Of values added to the NaN that a GPU computes: its bits are ones, and rounding adds more."""
    kernels, codes = load_kernels(name, device), room(700, 4, 64, device=device)
    kernels.quantize(rows(700).to(device), codes, noise=None)
    number = torch.int32 if memory_dtype == torch.float32 else torch.int16
    ones = torch.full((2, 700), torch.iinfo(number).max, dtype=number, device=device)
    out, fresh = (torch.zeros(2, 700, dtype=dtype, device=device) for _ in range(2))
    finite = kernels.delta_decode(codes, Cached(ones.view(memory_dtype), fresh), out)
    return bool(out.isnan().all() and fresh.isnan().all() and not finite.any())
