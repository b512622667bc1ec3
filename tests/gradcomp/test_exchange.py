"""Exchanges between replicas in one process."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from tests.gradcomp.exchanges import (
    along_ring,
    check_primitives,
    check_ring,
    gathered,
    message,
    sharded,
    summed,
)
from tests.gradcomp.replicas import Through, all_of
from thinpipe.gradcomp.local_peers import LocalPeers, local_peers
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.wire.header import DesyncError


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_replicas_find_the_same(size: int) -> None:
    peers = local_peers(size)
    found = all_of(peers, lambda peer: (sharded(peer), summed(peer), gathered(peer)))
    for rank, one in enumerate(found):
        check_primitives(size, rank, one)


@dataclass
class Noting(Through):
    """Knows in which order it was called."""

    calls: list[str] = field(default_factory=list)

    def expect(self, *arguments: Any, **options: Any) -> None:
        self.calls.append("expect")
        super().expect(*arguments, **options)

    def exchange(self, *arguments: Any, **options: Any) -> dict[int, Tensor]:
        self.calls.append("exchange")
        return super().exchange(*arguments, **options)


def test_a_sum_expects_both_its_messages_before_it_sends() -> None:
    """Else each waits once more for the delay of the link."""
    peers = [Noting(inner) for inner in local_peers(2)]
    all_of(peers, sharded)
    for one in peers:
        assert one.calls == ["expect", "expect", "exchange", "exchange"]


def test_replicas_may_exchange_with_neighbors_only() -> None:
    peers = local_peers(4)
    for _ in range(2):
        for rank, found in enumerate(all_of(peers, along_ring)):
            check_ring(4, rank, found)
    assert {peer.bytes_sent for peer in peers} == {2 * message(50, 0).numel()}


def test_an_exchange_of_another_step_is_noticed() -> None:
    def of_another_step(peer: LocalPeers) -> str:
        with pytest.raises(DesyncError) as caught:
            sharded(peer, step=peer.rank)
        return str(caught.value)

    first, second = all_of(local_peers(2), of_another_step)
    assert first.startswith("exchange 0, bucket 0, message to the server from replica 1: ")
    assert "exchange: peer sent 1, expected 0" in first
    assert "exchange: peer sent 0, expected 1" in second


def test_a_silent_peer_is_named() -> None:
    first, _ = local_peers(2, timeout_s=0.1)
    with pytest.raises(TransportError, match=r"replica 1 -> replica 0: no message in 0\.1 s"):
        first.exchange({1: message(4, 0)}, [1], 4)


@pytest.mark.parametrize(
    ("nbytes", "capacity", "reported"),
    [
        (4, 299, "up to 299 bytes, where at most 300 can be"),  # it is at another exchange
        (400, 300, "replica 1 -> replica 0: a payload of up to 400 bytes"),
    ],
)
def test_a_message_that_cannot_be_is_rejected(nbytes: int, capacity: int, reported: str) -> None:
    first, second = local_peers(2)
    second.exchange({0: message(nbytes, 0)}, [], capacity)
    with pytest.raises(DesyncError, match=reported):
        first.exchange({}, [1], 300)
