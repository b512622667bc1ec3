"""The CUDA kernels: interpreted against the reference, compiled without a GPU, and run on one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.wire.kernels import test_hadamard as tiles
from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import Codes, load_kernels

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [*((bits, 400 + bits, 100) for bits in (1, 2, 7, 8)), (4, 9, 4), (3, 1024, 1024)]
"""All widths of fields, rounded either way, in full blocks and others."""
MORE_CASES = [
    (bits, numel, group)
    for bits in range(1, 9)
    for numel, group in ((1024, 128), (1500, 100), (9, 4), (70_000, 768), (1, 1))
]


def room(numel: int, bits: int, group: int, scale: torch.dtype, device: torch.device) -> Codes:
    payload = torch.full((2, bits * -(-numel // 8)), 255, dtype=torch.uint8, device=device)
    scales = torch.full((2, -(-numel // group)), torch.nan, dtype=scale, device=device)
    return Codes(payload, scales, bits, group)


def results(name: Any, device: torch.device, case: tuple[int, int, int]) -> list[torch.Tensor]:
    """Everything the kernels write for a case; formats and rounding take turns."""
    bits, numel, group = case
    kernels, turn = load_kernels(name, device), bits + numel
    dtype, memory_dtype = DTYPES[turn % 3], DTYPES[(turn + bits) % 3]
    scale = torch.bfloat16 if turn % 2 else torch.float32
    generator = torch.Generator().manual_seed(turn)
    x = (3 * torch.randn(2, numel, generator=generator)).to(device, dtype)
    memory = torch.randn(2, numel, generator=generator).to(device, memory_dtype)
    x[1, numel // 2 :: 977] = torch.inf if turn % 5 == 0 else 1e-30
    ids = torch.tensor([5, 2**40], device=device)
    key = 5 if bits % 3 == 1 else -(2**40) - 9  # Triton passes small numbers as int32
    noise = None if bits == 1 or bits % 3 == 0 else Noise(key, 2**31 + 7, ids)
    plain, delta = (room(numel, bits, group, scale, device) for _ in range(2))
    out, value = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    fresh, kept = torch.full_like(memory, torch.nan), torch.full_like(memory, torch.nan)
    kernels.quantize(x, plain, noise=noise)
    kernels.dequantize(plain, out)
    finite = kernels.delta_encode(x, Cached(memory, fresh), delta, noise=noise)
    kernels.delta_decode(delta, Cached(memory, kept), value)
    found = [*plain[:2], out, *delta[:2], fresh, kept, value, finite]
    return [tensor.cpu() for tensor in found]


def nan_that_wraps(name: Any, device: torch.device) -> list[torch.Tensor]:
    """Values added to the NaN that a GPU computes, whose bits are all ones, stored as bf16."""
    plain, out = room(9, 4, 4, torch.float32, device), torch.zeros(2, 9, device=device)
    kernels = load_kernels(name, device)
    kernels.quantize(torch.ones_like(out), plain, noise=None)
    memory = torch.full((2, 9), 0x7FFFFFFF, dtype=torch.int32, device=device).view(torch.float32)
    fresh = torch.zeros(2, 9, dtype=torch.bfloat16, device=device)
    finite = kernels.delta_decode(plain, Cached(memory, fresh), out)
    return [fresh.cpu(), finite.cpu()]


def of_strided_rows(name: Any, device: torch.device) -> list[torch.Tensor]:
    """Values of a row that do not lie side by side, read and written."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2100, 2, generator=generator).to(device).t()
    kernels, memory = load_kernels(name, device), torch.ones(2, 2100, device=device)
    plain, delta = (room(2100, 4, 100, torch.bfloat16, device) for _ in range(2))
    fresh, kept = torch.full_like(memory, torch.nan), torch.full_like(memory, torch.nan)
    out, value = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    kernels.quantize(x, plain, noise=None)
    kernels.dequantize(plain, out)
    kernels.delta_encode(x, Cached(memory, fresh), delta, noise=None)
    kernels.delta_decode(delta, Cached(memory, kept), value)
    return [t.cpu() for t in (*plain[:2], out, *delta[:2], fresh, kept, value)]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, with every NaN alike: only the reference's NaNs in values are torch's own."""
    if tensor.is_floating_point():
        tensor = tensor.where(~tensor.isnan(), torch.tensor(torch.nan, dtype=tensor.dtype))
    return tensor.contiguous().view(torch.uint8)


def differing(device: torch.device, cases: list[tuple[int, int, int]]) -> list[str]:
    """Cases and results that are not the reference's on a CPU."""
    found = []
    for case in cases:
        pairs = zip(
            results("reference", torch.device("cpu"), case),
            results("triton", device, case),
            strict=True,
        )
        found += [
            f"{case}: result {i}"
            for i, (expected, got) in enumerate(pairs)
            if not torch.equal(bits_of(expected), bits_of(got))
        ]
    strided = zip(
        of_strided_rows("reference", torch.device("cpu")),
        of_strided_rows("triton", device),
        strict=True,
    )
    if not all(torch.equal(bits_of(expected), bits_of(got)) for expected, got in strided):
        found.append("strided rows")
    fresh, finite = nan_that_wraps("triton", device)
    return found if fresh.isnan().all() and not finite.any() else [*found, "NaN was lost"]


def test_interpreted_kernels_are_the_reference_bit_for_bit() -> None:
    """In a process of its own: triton reads TRITON_INTERPRET when a kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", range(1, 9))
def test_kernels_on_a_gpu_are_the_reference_bit_for_bit(bits: int) -> None:
    """By bits, as every case compiles kernels of its own: workers share that."""
    assert differing(torch.device("cuda"), [case for case in MORE_CASES if case[0] == bits]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_reference_is_the_same_on_a_gpu(bits: int) -> None:
    for case in (case for case in MORE_CASES if case[0] == bits):
        on_cpu, on_gpu = (
            results("reference", torch.device(name), case) for name in ("cpu", "cuda")
        )
        for expected, found in zip(on_cpu, on_gpu, strict=True):
            assert torch.equal(bits_of(expected), bits_of(found)), case


if __name__ == "__main__":
    wrong = differing(torch.device("cpu"), CASES)
    sys.exit("\n".join([*wrong, *tiles.differing("triton", "cpu", step=2)]) or 0)
