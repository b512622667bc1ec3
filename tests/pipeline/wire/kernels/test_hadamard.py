"""The tile kernels: every backend is the reference bit for bit; a rotation is its own inverse."""

from typing import Any

import pytest
import torch

from thinpipe.pipeline.wire.codec import Cached
from thinpipe.pipeline.wire.kernels import TILE, load
from thinpipe.pipeline.wire.kernels.hadamard import Plan

DTYPES = [torch.float32, torch.bfloat16]
CASES = [(numel, dtype) for dtype in DTYPES for numel in (1, 300, 2100)]


def results(name: Any, device: str, case: tuple[int, torch.dtype]) -> list[torch.Tensor]:
    """Everything the kernels write for a case, outputs poisoned before."""
    numel, dtype = case
    tiles, kernels = -(-numel // TILE), load("hadamard", name, torch.device(device))
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(4, numel, generator=generator) * 3
    x[1, ::7] = torch.nan
    x[1, ::11] = -torch.inf
    x[2] *= 1e37
    x[3, ::50] *= 40
    x = x.to(device, dtype)
    if numel == 300:  # values of a row need not lie side by side
        x = x.t().contiguous().t()
    memory = torch.randn(x.shape, generator=generator).to(device, torch.bfloat16)
    order = torch.stack([torch.randperm(tiles, generator=generator) for _ in range(4)])
    order, found = order.to(device, torch.int32), []
    for before in (None, memory):
        peak = torch.full((4, tiles), torch.nan, device=device)
        turned = torch.full((4, tiles), 7, dtype=torch.uint8, device=device)
        kernels.survey(x, before, peak, turned)
        gathered = torch.full((4, tiles, TILE), torch.nan, device=device)
        kernels.gather(x, before, Plan(order, turned), gathered)
        found += [peak, turned, gathered]
    out, value = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    fresh, kept = torch.full_like(memory, torch.nan), torch.full_like(memory, torch.nan)
    plan = Plan(order, turned)
    kernels.scatter(gathered, plan, out)
    finite = kernels.scatter_change(gathered, plan, Cached(memory, fresh), value)
    assert torch.equal(finite, kernels.scatter_change(gathered, plan, Cached(memory, kept), None))
    return [*found, out, value, fresh, kept, finite]


def differing(name: str, device: str, step: int = 1) -> list[str]:
    """Cases (every `step`-th) and results that are not the reference's on a CPU, NaNs all alike."""
    found = []
    for case in CASES[::step]:
        expected, got = results("reference", "cpu", case), results(name, device, case)
        found += [
            f"{case}: result {i}"
            for i, (one, other) in enumerate(zip(expected, got, strict=True))
            if not torch.equal(one.nan_to_num(9.0).cpu(), other.nan_to_num(9.0).cpu())
        ]
    return found


def test_compiled_kernels_are_the_reference_bit_for_bit() -> None:
    assert differing("numba", "cpu") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_gpu_are_the_reference_bit_for_bit() -> None:
    assert differing("triton", "cuda") == []


def test_a_rotation_keeps_lengths_and_undoes_itself() -> None:
    kernels = load("hadamard", "reference")
    x = torch.zeros(1, 3 * TILE)
    x[0, :TILE] = torch.randn(TILE, generator=torch.Generator().manual_seed(0))
    x[0, TILE + 3] = 8.0  # an outlier is spread evenly
    turned, order = torch.ones(1, 3, dtype=torch.uint8), torch.tensor([[2, 0, 1]]).int()
    tiles, back = torch.full((1, 3, TILE), torch.nan), torch.full_like(x, torch.nan)
    kernels.gather(x, None, Plan(order, turned), tiles)
    kernels.scatter(tiles, Plan(order, turned), back)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-5)
    torch.testing.assert_close(tiles[0, 1].norm(), x[0, :TILE].norm())
    assert (tiles[0, 2].abs() == 8.0 / TILE**0.5).all()
    assert (tiles[0, 0] == 0).all()


def test_what_rotation_makes_worse_or_could_overflow_stays() -> None:
    x = torch.zeros(5, TILE)
    x[0, 0] = 1.0  # rotating helps
    x[1] = 1.0  # rotating makes one peak of it
    x[2, 0] = 2.0**100
    x[3, 0] = torch.nan
    peak, turned = torch.empty(1, 5), torch.empty(1, 5, dtype=torch.uint8)
    load("hadamard").survey(x.view(1, -1), None, peak, turned)
    assert turned.tolist() == [[1, 0, 0, 0, 0]]
    assert peak.tolist() == [[0.125, 1.0, 2.0**100, torch.inf, 0.0]]
