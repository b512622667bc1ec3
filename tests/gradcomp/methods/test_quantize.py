"""Quantized sums: nothing is lost for good, and the bytes are few."""

from typing import Any

import torch

from tests.gradcomp.replicas import Replicas, all_of
from thinpipe.gradcomp.buckets import make_buckets
from thinpipe.gradcomp.exchange import ExchangeKey
from thinpipe.gradcomp.feedback import ServedReducer
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.pipeline.wire.uniform import Uniform


def reduce_all(reducers: list[ServedReducer], local: list[torch.Tensor], step: int) -> list[Any]:
    """One exchange of a single bucket; `local` has one vector per replica."""
    (bucket,) = make_buckets([torch.nn.Parameter(torch.zeros_like(local[0]))])
    return all_of(
        list(zip(reducers, local, strict=True)),
        lambda pair: pair[0].reduce(bucket, pair[1].clone(), ExchangeKey(step, 0)),
    )


def test_sums_and_residuals_account_for_every_gradient() -> None:
    numel, rounds, size = 1000, 20, 3
    peers = local_peers(size)
    reducers = [ServedReducer(peer, Uniform(2, 128)) for peer in peers]
    generator = torch.Generator().manual_seed(1)
    given, got = torch.zeros(numel), torch.zeros(numel)
    for step in range(rounds):
        local = [torch.randn(numel, generator=generator) for _ in range(size)]
        given += sum(local)
        answers = reduce_all(reducers, local, step)
        assert all(torch.equal(answers[0], answer) for answer in answers)
        got += answers[0]
        for reducer in reducers:
            reducer.keep()
    states = [reducer.state_dict() for reducer in reducers]
    rest = sum(state["sent-0"] for state in states)
    served = torch.cat([state["served-0"] for state in states])
    torch.testing.assert_close(got + rest + served, given, rtol=1e-4, atol=1e-4)
    assert (got - given).norm() / given.norm() < 0.5


def test_a_skipped_step_leaves_no_trace() -> None:
    replicas = Replicas(2, "quantize", {"bits": 2})
    replicas.step()
    before = replicas.syncs[0].state_dict()["reducer"]
    kept = {name: rest.clone() for name, rest in before.items()}
    with torch.no_grad():
        next(replicas.nets[0].parameters())[0, 0] = float("nan")
    replicas.backward()
    all_of(replicas.syncs, lambda sync: sync.before_step())  # no optimizer step, no after_step
    after = replicas.syncs[0].state_dict()["reducer"]
    assert all(torch.equal(after[name], rest) for name, rest in kept.items())
    assert all(
        any(p.grad.isnan().any() for p in net.parameters() if p.grad is not None)
        for net in replicas.nets
    )


def test_four_bits_send_an_eighth_of_a_ring() -> None:
    numel = 64 * 1024
    peers = local_peers(2)
    reducers = [ServedReducer(peer, Uniform(4, 128)) for peer in peers]
    reduce_all(reducers, [torch.randn(numel) for _ in range(2)], 0)
    sent = sum(peer.bytes_sent for peer in peers)
    assert 2 * 4 * numel / sent > 7.5
