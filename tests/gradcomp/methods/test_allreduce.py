"""The baseline: exact sums, the bytes of a ring, and what bf16 costs."""

import pytest
import torch

from tests.gradcomp.replicas import Replicas, all_of, make_net
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES

PARAMETERS = 53


def summed(replicas: Replicas) -> list[torch.Tensor]:
    replicas.backward()
    for sync in replicas.syncs:  # the exchange was started by backward
        sync.before_step()
    return [
        torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        for net in replicas.nets
    ]


def expected() -> torch.Tensor:
    """The sum over three replicas, by another way."""
    net = make_net()
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        (net(torch.randn(4, 6, generator=generator)).square().sum() / 12).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize(("form", "tolerance"), [("fp32", 1e-6), ("bf16", 2**-7)])
def test_all_replicas_get_the_sum(form: str, tolerance: float) -> None:
    found = summed(Replicas(3, "allreduce", {"format": form, "bucket_mb": 1e-4}))
    for gradient in found:
        torch.testing.assert_close(gradient, expected(), rtol=2 * tolerance, atol=tolerance)
        assert torch.equal(gradient, found[0])


@pytest.mark.parametrize(("form", "nbytes"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("size", [2, 3])
def test_it_sends_what_a_ring_sends_and_headers(size: int, form: str, nbytes: int) -> None:
    replicas = Replicas(size, "allreduce", {"format": form})
    for _ in range(2):
        replicas.step()
    sent = sum(sync.bytes_sent for sync in replicas.syncs)
    headers = 2 * size * (size - 1) * EXCHANGE_HEADER_NBYTES
    assert sent == 2 * (2 * (size - 1) * nbytes * PARAMETERS + headers)


def test_a_parameter_without_gradient_counts_as_zero() -> None:
    replicas = Replicas(2, "allreduce", {"bucket_mb": 1e-4})
    for rank, (net, sync) in enumerate(zip(replicas.nets, replicas.syncs, strict=True)):
        for index, parameter in enumerate(net.parameters()):
            if not (rank == 1 and index == 0):
                parameter.grad = torch.full_like(parameter, rank + 1.0)
        sync.begin_step(0, 0)
    all_of(replicas.syncs, lambda sync: sync.before_step())
    for net in replicas.nets:
        means = [float(p.grad.mean()) for p in net.parameters() if p.grad is not None]
        assert means == [1.0, 3.0, 3.0, 3.0]


def test_nan_reaches_all_replicas() -> None:
    replicas = Replicas(2, "allreduce", {"format": "bf16"})
    with torch.no_grad():
        next(replicas.nets[1].parameters()).fill_(float("nan"))
    for gradient in summed(replicas):
        assert gradient.isnan().any()
