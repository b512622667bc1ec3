"""Averages with neighbours keep the mean of all, and bring replicas together."""

import pytest
import torch

from tests.gradcomp.replicas import Replicas, all_of
from thinpipe.gradcomp.methods.decentralized import neighbours


def apart(size: int, method: str, options: dict[str, object]) -> Replicas:
    """Replicas that are far from each other, and train no more."""
    replicas = Replicas(size, method, {"bucket_mb": 1e-4, **options})
    replicas.begin()
    all_of(replicas.syncs, lambda sync: sync.before_step())
    for rank, net in enumerate(replicas.nets):
        for parameter in net.parameters():
            parameter.data += torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(rank)
            )
    return replicas


def exchange(replicas: Replicas) -> None:
    replicas.begin()
    all_of(replicas.syncs, lambda sync: sync.before_step())


@pytest.mark.parametrize(("size", "peers"), [(5, "ring"), (2, "ring"), (4, "pairs"), (2, "pairs")])
def test_the_mean_stays_and_replicas_meet(size: int, peers: str) -> None:
    replicas = apart(size, "decentralized", {"peers": peers})
    before = torch.stack(replicas.parameters())
    spread = before.var(0).sum()
    for _ in range(12):
        exchange(replicas)
    after = torch.stack(replicas.parameters())
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=1e-5, atol=1e-6)
    assert after.var(0).sum() < 0.02 * spread


@pytest.mark.parametrize("size", [2, 4, 6])
def test_pairs_are_mutual_and_all_of_the_other_half_are_met(size: int) -> None:
    met: list[set[int]] = [set() for _ in range(size)]
    for step in range(size // 2):
        for rank in range(size):
            (other,) = neighbours(rank, size, step, "pairs")
            assert neighbours(other, size, step, "pairs") == [rank]
            met[rank].add(other)
    halves = set(range(size // 2)), set(range(size // 2, size))
    assert met == [halves[rank < size // 2] for rank in range(size)]


def test_pairs_of_an_odd_number_are_rejected() -> None:
    with pytest.raises(ValueError, match="3 replicas are not pairs"):
        Replicas(3, "decentralized", {"peers": "pairs"})


def test_evaluation_sees_the_mean_and_the_end_is_it() -> None:
    replicas = apart(3, "decentralized", {})
    mean = torch.stack(replicas.parameters()).mean(0)
    for found in replicas.global_parameters():
        torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-6)
    replicas.finish()
    first, *others = replicas.parameters()
    torch.testing.assert_close(first, mean, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(first, other) for other in others)


def test_a_longer_interval_sends_less() -> None:
    sent = []
    for interval in (1, 3):
        replicas = Replicas(3, "decentralized", {"interval": interval})
        for _ in range(7):
            replicas.step()
        sent.append(replicas.syncs[0].bytes_sent)
    assert sent[0] == 3 * sent[1]
