"""While one message is on the way, the next ones are encoded; few wait to be sent."""

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import wait

import torch
from torch import Tensor

from thinpipe.gradcomp.local_peers import LocalPeers, local_peers
from thinpipe.gradcomp.sharded.collectives import Exchanges
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.gradcomp.sharded.segments import Segmented
from thinpipe.pipeline.wire.cast import Cast

CODEC, UNITS, WAIT_S = Segmented([4], [Cast("fp32")]), 4, 120


class SlowPeers(LocalPeers):
    """Nothing passes its link before `open`."""

    open: threading.Event

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int, lane: int = 0
    ) -> dict[int, Tensor]:
        assert self.open.wait(WAIT_S)
        return super().exchange(outgoing, sources, capacity, lane)


def test_two_messages_are_encoded_ahead_and_no_more() -> None:
    ranks = [SlowPeers(peers.rank, peers.size, peers.mailboxes) for peers in local_peers(2)]
    link = threading.Event()
    events = [[threading.Event() for _ in range(UNITS)] for _ in ranks]
    gathered, futures = [], []
    for peers, encoded in zip(ranks, events, strict=True):
        peers.open = link
        exchanges = Exchanges(peers, ShardsConfig(), seed=peers.rank)
        for unit in range(UNITS):
            parts = [torch.full((4,), float(10 * unit + peers.rank)) for _ in ranks]
            futures.append(exchanges.gather(unit, CODEC, parts, before=[encoded[unit].set]))
            gathered.append((unit, parts))
    assert all(encoded[unit].wait(WAIT_S) for encoded in events for unit in (0, 1))
    assert not any(encoded[2].wait(0.2) for encoded in events)
    link.set()
    assert not wait(futures, WAIT_S).not_done
    for unit, parts in gathered:
        assert [float(part[0]) for part in parts] == [10 * unit, 10 * unit + 1]
