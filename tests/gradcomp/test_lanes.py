"""Buckets are exchanged at the same time, as far as there are lanes."""

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gradcomp.replicas import Through, all_of
from tests.waiting import PATIENCE_S, until
from thinpipe.gradcomp.exchange import EXACT
from thinpipe.gradcomp.gradient_sync import AllReduce, GradientSync
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.registry import load_method, parse_options
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.transport import LANES

REPLICAS = 2


@dataclass
class Counting(Through):
    """Knows the most exchanges that were under way at once; waits until there are `awaited`."""

    awaited: threading.Barrier | None = None
    under_way: int = 0
    most: int = 0
    counting: threading.Lock = field(default_factory=threading.Lock)

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int, lane: int = 0
    ) -> dict[int, Tensor]:
        with self.counting:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        if self.awaited is not None:
            self.awaited.wait(PATIENCE_S)
        found = super().exchange(outgoing, sources, capacity, lane)
        with self.counting:
            self.under_way -= 1
        return found


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("allreduce", {}),
        ("cocktail", {}),
        ("decentralized", {}),
        ("ef_gradients", {"delayed": True}),
    ],
)
def test_a_bucket_in_each_lane_is_exchanged_at_the_same_time(
    method: str, options: dict[str, Any]
) -> None:
    ends = [Counting(peers) for peers in local_peers(REPLICAS)]
    parameters = [[nn.Parameter(torch.ones(8)) for _ in range(2 * LANES)] for _ in ends]
    parsed = parse_options(method, {"bucket_mb": 32e-6, **options})
    syncs = [
        load_method(method).build(parsed, own, end)
        for own, end in zip(parameters, ends, strict=True)
    ]
    for end in ends:
        end.awaited = threading.Barrier(LANES)

    def step(rank: int) -> None:
        for number in range(2):
            syncs[rank].begin_step(number, 1)
            for parameter in parameters[rank]:
                parameter.grad = torch.ones(8)
            syncs[rank].before_step()
            syncs[rank].commit()
            syncs[rank].after_step()
        syncs[rank].finish()

    all_of(range(REPLICAS), step)
    assert [end.most for end in ends] == [LANES] * REPLICAS


def test_threads_of_an_exchange_that_failed_end() -> None:
    (end, _) = local_peers(2, timeout_s=0.01)
    parameters = [nn.Parameter(torch.zeros(8)) for _ in range(LANES)]
    sync = GradientSync(parameters, end, AllReduce(end, EXACT), 32)
    before = {*threading.enumerate()}
    sync.begin_step(0, 1)
    for parameter in parameters:
        (parameter * 2).sum().backward()  # type: ignore[no-untyped-call]
    threads = {*threading.enumerate()} - before
    assert len(threads) == LANES
    with pytest.raises(TransportError):
        sync.before_step()
    sync.abandon()
    until(lambda: not any(thread.is_alive() for thread in threads))
