"""Laws of CocktailSGD's compressor, over whole exchanges between replicas in one process."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.wire.entropy import CodingError
from pipeline.wire.sparse import SparseCodec
from pipeline.wire.subset import Subset, largest_size, random_subset
from pipeline.wire.subset_codec import SubsetCodec


def values(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def message(room: torch.Tensor, length: int) -> torch.Tensor:
    return room[:length].clone()


@dataclass
class Replicas:
    """Their vectors, the base that each holds, and the server's error."""

    numel: int
    codec: SparseCodec
    fraction: float = 0.1
    count: int = 3
    dtype: torch.dtype = torch.float32
    start: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.start = values(self.numel, 100).to(self.dtype)
        self.x = [self.start.clone() for _ in range(self.count)]
        self.base = [self.start.clone() for _ in range(self.count)]
        self.error = torch.zeros(self.numel)
        size = largest_size(self.numel, self.fraction)
        self.compressor = SubsetCodec(self.codec, size)
        self.room = torch.empty(self.codec.capacity(size), dtype=torch.uint8)

    def subset(self, step: int) -> Subset:
        return random_subset(self.numel, fraction=self.fraction, seed=1, step=step, bucket=0)

    def sent(self, subset: Subset) -> list[torch.Tensor]:
        return [
            message(self.room, self.compressor.encode_change(x, base, subset, self.room))
            for x, base in zip(self.x, self.base, strict=True)
        ]

    def exchange(self, step: int) -> None:
        subset = self.subset(step)
        sent = self.sent(subset)
        left = torch.full((subset.size,), torch.nan)
        length = self.compressor.encode_mean(sent, self.error, subset, self.room, left)
        mean = message(self.room, length)
        subset.scatter(left, self.error)
        for own, x, base in zip(sent, self.x, self.base, strict=True):
            self.compressor.settle(own, mean, subset, x, base)

    def move(self, step: int) -> torch.Tensor:
        """Give every replica an update of its own; returns their mean."""
        updates = [0.01 * values(self.numel, 1000 * step + r) for r in range(self.count)]
        for x, update in zip(self.x, updates, strict=True):
            x += update.to(self.dtype)
        return torch.stack(updates).mean(0)


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_nothing_is_lost_and_all_replicas_share_the_base(backend: Any) -> None:
    replicas = Replicas(5003, SparseCodec(0.2, 4, backend=backend), fraction=0.4)
    total = torch.zeros(5003)
    for step in range(30):
        total += replicas.move(step)
        replicas.exchange(step)
        assert all(torch.equal(base, replicas.base[0]) for base in replicas.base)
        said = torch.stack(replicas.x).mean(0) + replicas.error
        torch.testing.assert_close(said, replicas.start + total, rtol=1e-5, atol=1e-5)
    lag = (replicas.base[0] - replicas.start - total).norm() / total.norm()
    assert 0 < lag < 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_values_in_fp32_is_exact_averaging(dtype: torch.dtype) -> None:
    replicas = Replicas(1003, SparseCodec(1.0, 32), fraction=1.0, count=4, dtype=dtype)
    for step in range(3):
        replicas.move(step)
        base = replicas.base[0].float().clone()
        mean = sum(x.float() - base for x in replicas.x) / 4
        replicas.exchange(step)
        for x, shared in zip(replicas.x, replicas.base, strict=True):
            assert torch.equal(x, shared)
            assert torch.equal(shared, (base + mean).to(dtype))
    assert (replicas.error == 0).all()


@given(numel=st.integers(1, 900), fraction=st.sampled_from([0.1, 0.4, 1.0]), bits=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_the_residual_is_what_was_not_sent(numel: int, fraction: float, bits: int) -> None:
    replicas = Replicas(numel, SparseCodec(0.3, bits), fraction=fraction, count=1)
    replicas.move(0)
    before, subset = replicas.x[0] - replicas.base[0], replicas.subset(2)
    (sent,) = replicas.sent(subset)
    seen = torch.full((subset.size,), torch.nan)
    replicas.codec.decode(sent, seen)
    nothing = replicas.room[: replicas.codec.encode(torch.zeros(subset.size), replicas.room)]
    replicas.compressor.settle(sent, nothing, subset, replicas.x[0], replicas.base[0])
    expected = before.clone()
    taken = torch.empty(subset.size)
    subset.gather(before, taken)
    subset.scatter(taken - seen, expected)
    assert torch.equal(replicas.base[0], replicas.start)
    torch.testing.assert_close(
        replicas.x[0] - replicas.base[0], expected, rtol=0, atol=float(before.abs().max()) * 2e-5
    )


def test_coordinates_outside_the_subset_do_not_move() -> None:
    replicas = Replicas(5003, SparseCodec(0.2, 4))
    replicas.move(0)
    kept = [x.clone() for x in replicas.x]
    outside = torch.ones(5003)
    subset = replicas.subset(4)
    subset.scatter(torch.zeros(subset.size), outside)
    replicas.exchange(4)
    for x, old, base in zip(replicas.x, kept, replicas.base, strict=True):
        assert torch.equal(x[outside.bool()], old[outside.bool()])
        assert torch.equal(base[outside.bool()], replicas.start[outside.bool()])
    assert not torch.equal(replicas.base[0], replicas.start)


def test_encoding_changes_nothing_that_a_failed_exchange_would_leave() -> None:
    replicas = Replicas(2000, SparseCodec(0.2, 4))
    replicas.move(0)
    kept = [t.clone() for t in (*replicas.x, *replicas.base, replicas.error)]
    subset = replicas.subset(0)
    sent, left = replicas.sent(subset), torch.empty(subset.size)
    replicas.compressor.encode_mean(sent, replicas.error, subset, replicas.room, left)
    hurt = sent[0][:-1]
    with pytest.raises(CodingError):
        replicas.compressor.settle(sent[0], hurt, subset, replicas.x[0], replicas.base[0])
    assert all(map(torch.equal, kept, (*replicas.x, *replicas.base, replicas.error)))


def test_messages_at_the_published_setting_are_200_times_smaller_than_a_ring() -> None:
    """fp32 ring all-reduce moves 32 bits a parameter in each direction, N to N."""
    replicas = Replicas(1_000_000, SparseCodec(0.2, 4), count=2)
    replicas.move(0)
    subset = replicas.subset(0)
    sent, left = replicas.sent(subset), torch.empty(subset.size)
    length = replicas.compressor.encode_mean(sent, replicas.error, subset, replicas.room, left)
    for nbytes in (len(sent[0]), len(sent[1]), length):
        assert 32 * 1_000_000 / (8 * nbytes) > 220


def test_a_nan_on_one_replica_reaches_all_bases() -> None:
    replicas = Replicas(500, SparseCodec(0.2, 4), fraction=1.0)
    replicas.x[1][77] = torch.nan
    replicas.exchange(0)
    assert all(base[77].isnan() for base in replicas.base)
