"""Sparse sums of gradients: what was left out comes later."""

from typing import Any

import torch
from torch import Tensor

from tests.gradcomp.replicas import Replicas, all_of
from thinpipe.gradcomp.buckets import make_buckets
from thinpipe.gradcomp.exchange import ExchangeKey
from thinpipe.gradcomp.feedback import ServedReducer
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.methods.ef_gradients import Config


def exchange(size: int, config: Config, *, numel: int, rounds: int) -> torch.Tensor:
    """What is still owed of random gradients, by their norm."""
    peers = local_peers(size)
    reducers = [ServedReducer(peer, config.codec) for peer in peers]
    (bucket,) = make_buckets([torch.nn.Parameter(torch.zeros(numel))], 4 * numel)
    generator = torch.Generator().manual_seed(1)
    given, got = torch.zeros(numel), torch.zeros(numel)
    for step in range(rounds):
        local = [torch.randn(numel, generator=generator) for _ in range(size)]
        given += sum(local)
        answers = all_of(
            list(zip(reducers, local, strict=True)),
            lambda pair: pair[0].reduce(bucket, pair[1].clone(), ExchangeKey(step, 0)),  # noqa: B023
        )
        assert all(torch.equal(answers[0], answer) for answer in answers)
        got += answers[0]
        for reducer in reducers:
            reducer.keep()
    states = [reducer.state_dict() for reducer in reducers]
    served = torch.cat([state["served-0"] for state in states])
    owed = sum((state["sent-0"] for state in states), served)
    torch.testing.assert_close(got + owed, given, rtol=1e-4, atol=1e-4)
    return owed.norm() / given.norm()


def test_everything_is_sent_in_time() -> None:
    fractions = (1.0, 0.2, 0.02)
    owed = [exchange(3, Config(fraction=f, bits=8), numel=3000, rounds=12) for f in fractions]
    assert owed[0] < 0.01 < owed[1] < owed[2] < 1.0


def test_all_values_exactly_are_an_all_reduce() -> None:
    owed = exchange(2, Config(fraction=1.0, bits=32), numel=500, rounds=3)
    assert owed == 0


def delayed(size: int, **options: Any) -> Replicas:
    return Replicas(size, "ef_gradients", {"bucket_mb": 1e-4, "delayed": True, **options})


def summed(replicas: Replicas) -> Tensor:
    for net in replicas.nets:
        net.zero_grad()
    replicas.backward()
    all_of(replicas.syncs, lambda sync: sync.before_step())
    replicas.commit()
    all_of(replicas.syncs, lambda sync: sync.after_step())
    first, *others = (
        torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        for net in replicas.nets
    )
    assert all(torch.equal(first, other) or first.isnan().any() for other in others)
    return first


def test_a_delayed_step_applies_the_sums_of_the_one_before() -> None:
    late, prompt = delayed(2, fraction=1.0, bits=32), Replicas(2, "allreduce", {})
    expected = [summed(prompt) for _ in range(4)]
    assert not summed(late).any()
    for sums in expected[:3]:
        torch.testing.assert_close(summed(late), sums)
