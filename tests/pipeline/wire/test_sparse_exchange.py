"""Laws of CocktailSGD's compression, over whole exchanges between replicas in one process."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.pipeline.wire.kernels import Backend
from thinpipe.pipeline.wire.sparse import SparseCodec
from thinpipe.pipeline.wire.subset import Subset, largest_size, random_subset


def values(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


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
        self.room = torch.empty(self.codec.capacity(size), dtype=torch.uint8)

    def subset(self, step: int) -> Subset:
        return random_subset(self.numel, fraction=self.fraction, seed=1, step=step, bucket=0)

    def encoded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.full_like(x, torch.nan)
        length = self.codec.encode(x, self.room, seen)
        return self.room[:length].clone(), seen

    def sent(self, subset: Subset) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each replica's message and what it decodes to."""
        change, found = torch.empty(subset.size), []
        for x, base in zip(self.x, self.base, strict=True):
            subset.gather(x, change, base)
            found.append(self.encoded(change))
        return found

    def answered(
        self, messages: list[torch.Tensor], subset: Subset
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The server's message, and the error that it leaves."""
        total, error = torch.zeros(subset.size), torch.full((subset.size,), torch.nan)
        for message in messages:
            self.codec.decode_add(message, total)
        subset.gather(self.error, error)
        target = total / self.count + error
        message, seen = self.encoded(target)
        return message, target - seen

    def exchange(self, step: int) -> None:
        subset = self.subset(step)
        sent = self.sent(subset)
        message, left = self.answered([message for message, _ in sent], subset)
        mean = torch.full((subset.size,), torch.nan)
        self.codec.decode(message, mean)
        subset.scatter(left, self.error)
        for (_, own), x, base in zip(sent, self.x, self.base, strict=True):
            subset.apply_exchanged(own, mean, x, base)

    def move(self, step: int) -> torch.Tensor:
        """Give every replica an update of its own; returns their mean."""
        updates = [0.01 * values(self.numel, 1000 * step + r) for r in range(self.count)]
        for x, update in zip(self.x, updates, strict=True):
            x += update.to(self.dtype)
        return torch.stack(updates).mean(0)


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_nothing_is_lost_and_all_replicas_share_the_base(backend: Backend) -> None:
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
@settings(max_examples=40)
def test_the_residual_is_what_was_not_sent(numel: int, fraction: float, bits: int) -> None:
    replicas = Replicas(numel, SparseCodec(0.3, bits), fraction=fraction, count=1)
    replicas.move(0)
    before, subset = replicas.x[0] - replicas.base[0], replicas.subset(2)
    ((_, seen),) = replicas.sent(subset)
    subset.apply_exchanged(seen, torch.zeros(subset.size), replicas.x[0], replicas.base[0])
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


def test_messages_at_the_published_setting_are_200_times_smaller_than_a_ring() -> None:
    """fp32 ring all-reduce moves 32 bits a parameter in each direction, N to N."""
    replicas = Replicas(1_000_000, SparseCodec(0.2, 4), count=2)
    replicas.move(0)
    subset = replicas.subset(0)
    messages = [message for message, _ in replicas.sent(subset)]
    for message in (*messages, replicas.answered(messages, subset)[0]):
        assert 32 * 1_000_000 / (8 * len(message)) > 220


def test_a_nan_on_one_replica_reaches_all_bases() -> None:
    replicas = Replicas(500, SparseCodec(0.2, 4), fraction=1.0)
    replicas.x[1][77] = torch.nan
    replicas.exchange(0)
    assert all(base[77].isnan() for base in replicas.base)
