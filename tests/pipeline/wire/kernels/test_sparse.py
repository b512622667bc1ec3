"""The CPU kernels equal the reference bit for bit."""

import pytest
import torch

from thinpipe.pipeline.wire.kernels import Backend, load
from thinpipe.pipeline.wire.kernels.cpu import sparse as sparse_cpu
from thinpipe.pipeline.wire.kernels.reference import sparse as sparse_reference
from thinpipe.pipeline.wire.subset import RUN, random_subset

SIZES = (1, 15, 16, 17, 64, 65, 5003)
DTYPES = (torch.float32, torch.bfloat16)
BOTH = (sparse_reference, sparse_cpu)


def values(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def poisoned(numel: int) -> torch.Tensor:
    return torch.full((numel,), torch.nan)


def starts(numel: int) -> tuple[torch.Tensor, int]:
    """Runs that include the vector's last, short one, and how many values they have."""
    for step in range(20):
        subset = random_subset(numel, fraction=0.4, seed=1, step=step, bucket=0)
        if subset.size and int(subset.start_R[-1]) + RUN >= numel:
            return subset.start_R, subset.size
    raise AssertionError("no step has the last run")


@pytest.mark.parametrize("runs", [1, 3, 64, 12_345])
@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_dealt_runs_are_the_references(runs: int, part: float) -> None:
    keys = [1234, 0xFFFFFFFF, 77, 3, 2**31, 9]
    dealt = [torch.full((int(part * runs),), -1) for _ in BOTH]
    for kernels, out in zip(BOTH, dealt, strict=True):
        kernels.deal(runs - 1, runs, keys, out)
    assert torch.equal(*dealt)
    assert torch.equal(dealt[0], dealt[0].unique())
    assert not dealt[0].numel() or 0 <= int(dealt[0][0]) <= int(dealt[0][-1]) < runs


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_are_gathered_scattered_and_updated_alike(numel: int, dtype: torch.dtype) -> None:
    start, size = starts(numel)
    x, base = values(numel).to(dtype), values(numel, 1).to(dtype)
    sent, mean = values(size, 2), values(size, 3)
    for subtracted in (None, base):
        taken = [poisoned(size) for _ in BOTH]
        for kernels, out in zip(BOTH, taken, strict=True):
            kernels.gather(x, subtracted, start, RUN, out)
        assert torch.equal(*taken)
    ends = [(x.clone(), base.clone(), x.clone()) for _ in BOTH]
    for kernels, (moved, moved_base, put) in zip(BOTH, ends, strict=True):
        kernels.apply_exchanged(sent, mean, start, RUN, moved, moved_base)
        kernels.scatter(sent, start, RUN, put)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert not torch.equal(ends[0][1], base)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("share", [0.02, 0.2, 1.0])
def test_kept_values_are_selected_and_placed_alike(numel: int, share: float) -> None:
    x, kept = values(numel), max(1, int(share * numel))
    masks = [torch.full((-(-numel // 8),), 0xAA, dtype=torch.uint8) for _ in BOTH]
    chosen = [poisoned(kept) for _ in BOTH]
    for kernels, mask, out in zip(BOTH, masks, chosen, strict=True):
        kernels.select(x, mask, out)
    assert torch.equal(*masks)
    assert torch.equal(*chosen)
    placed, added = [poisoned(numel) for _ in BOTH], [-0.0 * x for _ in BOTH]
    for kernels, out, total in zip(BOTH, placed, added, strict=True):
        kernels.place(masks[0], chosen[0], out)
        kernels.place_add(masks[0], chosen[0], total)
    assert torch.equal(*placed)
    assert torch.equal(added[0].view(torch.int32), added[1].view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_nan_stays_one_in_every_format(dtype: torch.dtype) -> None:
    start = torch.tensor([0])
    nan = torch.full((4,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for kernels in BOTH:
        out = torch.zeros(4, dtype=dtype)
        kernels.scatter(nan, start, RUN, out)
        assert out.isnan().all()


def test_a_backend_without_sparse_kernels_is_rejected() -> None:
    backend: Backend = "triton"
    with pytest.raises(ValueError, match='backend = "triton"'):
        load("sparse", backend)
