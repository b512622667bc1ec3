"""The CUDA kernels: interpreted against the reference, compiled without a GPU, and run on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.pipeline.wire.kernels import test_hadamard as tiles
from tests.pipeline.wire.kernels import uniform
from tests.pipeline.wire.kernels.uniform import CPU, Case, bits_of, keeps_nan, results
from thinpipe.pipeline.wire.codec import Noise

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STRIDED = Case(4, 2100, 100, strided=True)


def case(bits: int, numel: int, group: int) -> Case:
    """Formats and rounding take turns."""
    turn = bits + numel
    key = 5 if bits % 3 == 1 else -(2**40) - 9  # Triton passes small numbers as int32
    return Case(
        *(bits, numel, group, DTYPES[turn % 3], DTYPES[(turn + bits) % 3]),
        torch.bfloat16 if turn % 2 else torch.float32,
        None if bits % 3 == 0 or bits == 1 else Noise(key, 2**31 + 7, torch.tensor([5, 2**40])),
        torch.inf if turn % 5 == 0 else 1e-30,
    )


CASES = [
    *(case(bits, 400 + bits, 100) for bits in (1, 2, 7, 8)),
    *(case(4, 9, 4), case(3, 1024, 1024), STRIDED),
]
"""All widths of fields, rounded either way, in full blocks and others."""
MORE_CASES = [
    case(bits, numel, group)
    for bits in range(1, 9)
    for numel, group in ((1024, 128), (1500, 100), (9, 4), (70_000, 768), (1, 1))
]


def differing(device: torch.device, cases: list[Case]) -> list[str]:
    kept = keeps_nan("triton", device, torch.float32, torch.bfloat16)
    return uniform.differing(cases, "triton", device) + ["NaN was lost"] * (not kept)


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
    cases = [case for case in MORE_CASES if case.bits == bits]
    assert differing(torch.device("cuda"), [*cases, STRIDED]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_reference_is_the_same_on_a_gpu(bits: int) -> None:
    for case in (case for case in MORE_CASES if case.bits == bits):
        on_cpu, on_gpu = (
            results("reference", torch.device(name), case) for name in ("cpu", "cuda")
        )
        for expected, found in zip(on_cpu, on_gpu, strict=True):
            assert torch.equal(bits_of(expected), bits_of(found)), case


if __name__ == "__main__":
    wrong = differing(CPU, CASES)
    sys.exit("\n".join([*wrong, *tiles.differing("triton", "cpu", step=2)]) or 0)
