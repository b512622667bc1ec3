"""Asynchronous averaging: the mean arrives late, and what was learnt meanwhile stays."""

import pytest
import torch
from torch import Tensor

from tests.gradcomp.replicas import Replicas, all_of


def move(replicas: Replicas, by: list[Tensor]) -> None:
    """One step in which every replica moves as it is told."""
    replicas.begin()
    all_of(replicas.syncs, lambda sync: sync.before_step())
    for net, change in zip(replicas.nets, by, strict=True):
        parts = change.split([p.numel() for p in net.parameters()])
        for parameter, part in zip(net.parameters(), parts, strict=True):
            parameter.data.add_(part.view_as(parameter))
    all_of(replicas.syncs, lambda sync: sync.after_step())


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_what_was_learnt_during_the_exchange_is_kept(overlap: int) -> None:
    replicas = Replicas(3, "async_average", {"interval": 3, "overlap": overlap})
    start = replicas.parameters()[0]
    generator = torch.Generator().manual_seed(0)
    moves = torch.randn(4 + overlap, 3, start.numel(), generator=generator)
    for change in moves:
        move(replicas, list(change))
    mean, later = moves[:3].sum(0).mean(0), moves[3:].sum(0)
    for rank, found in enumerate(replicas.parameters()):
        torch.testing.assert_close(found, start + mean + later[rank], rtol=1e-5, atol=1e-5)
