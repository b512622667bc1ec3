"""What methods send: as many bytes as their formats take, and headers."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.gradcomp.replicas import all_of
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.registry import load_method, parse_options
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES as HEADER

SIDE = 128
NUMEL = SIDE * SIDE
EXACT: Any = [
    ("allreduce", {}, 2, 2 * (HEADER + 4 * NUMEL // 2)),  # as a ring
    ("allreduce", {}, 4, 6 * (HEADER + 4 * NUMEL // 4)),
    ("allreduce", {"format": "bf16"}, 4, 6 * (HEADER + 2 * NUMEL // 4)),
    ("bytegrad", {}, 2, 2 * (HEADER + (NUMEL + 2 * SIDE) // 2)),  # 128 values share a scale
    ("decentralized", {}, 3, 2 * (HEADER + 4 * NUMEL)),  # to both neighbours
    ("low_precision_decentralized", {}, 3, 2 * (HEADER + NUMEL + 2 * SIDE)),
    # 32 places of 12 bits and a sign for each of 4 tiles: 158 times less than bf16
    ("demo", {}, 2, HEADER + 4 * 52),
    # 64 values of 12 + 2 bits and the scales of a tile (the authors' code stores 160 bytes)
    ("sparse_loco", {"interval": 1}, 2, HEADER + 20 + 4 * 112),
]


def sent(method: str, options: dict[str, Any], size: int, side: int) -> int:
    """Bytes that a replica sends in its second step, of a matrix of random numbers."""
    peers, parsed = local_peers(size), parse_options(method, options)
    weights = [nn.Parameter(torch.zeros(side, side)) for _ in peers]
    pairs = zip(weights, peers, strict=True)
    syncs = [load_method(method).build(parsed, [weight], peer) for weight, peer in pairs]
    before = 0
    for step in range(2):
        before = peers[0].bytes_sent
        all_of(syncs, lambda sync: sync.begin_step(step, 0))  # noqa: B023
        for weight in weights:
            weight.grad = torch.randn(side, side)
        all_of(syncs, lambda sync: sync.before_step())
        all_of(syncs, lambda sync: sync.commit())
        for weight in weights:
            weight.data += torch.randn(side, side)
        all_of(syncs, lambda sync: sync.after_step())
        all_of(syncs, lambda sync: sync.state_dict())  # waits
    return peers[0].bytes_sent - before


@pytest.mark.parametrize(("method", "options", "size", "nbytes"), EXACT)
def test_bytes_are_those_of_the_format(
    method: str, options: dict[str, Any], size: int, nbytes: int
) -> None:
    assert sent(method, options, size, SIDE) == nbytes


@pytest.mark.parametrize(
    ("method", "size", "times"),
    [("cocktail", 2, 200), ("ef_gradients", 2, 180), ("ef_gradients", 8, 180)],
)
def test_sparse_messages_are_two_hundred_times_smaller_than_a_rings(
    method: str, size: int, times: float
) -> None:
    """For any number of replicas."""
    ring = 8 * 1024 * 1024 * (size - 1) / size
    assert ring / sent(method, {}, size, 1024) > times
