"""Sums of gradients: exact ones, and what bf16 and 8 bits cost."""

from typing import Any

import pytest
import torch

from tests.gradcomp.replicas import Replicas, all_of, make_net


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


LEVEL = 2 * 3 * float(expected().abs().max()) / 127  # at most half of one on each way
SUMS: Any = [
    ("allreduce", {"format": "fp32", "bucket_mb": 1e-4}, 2e-6, 1e-6),
    ("allreduce", {"format": "bf16", "bucket_mb": 1e-4}, 2**-6, 2**-7),
    ("bytegrad", {}, 0, LEVEL),
]


@pytest.mark.parametrize(("method", "options", "rtol", "atol"), SUMS)
def test_all_replicas_get_the_sum(method: str, options: Any, rtol: float, atol: float) -> None:
    found = summed(Replicas(3, method, options))
    for gradient in found:
        torch.testing.assert_close(gradient, expected(), rtol=rtol, atol=atol)
        assert torch.equal(gradient, found[0])


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
