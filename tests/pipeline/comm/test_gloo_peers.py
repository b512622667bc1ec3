"""Exchanges over gloo: messages arrive whole, and failures name the edge.

One group of processes makes all exchanges, one after the other; tests look at what it found.
"""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gradcomp.exchanges import (
    along_ring,
    check_primitives,
    check_ring,
    gathered,
    message,
    sharded,
    summed,
    total,
)
from tests.ranks import run_ranks
from thinpipe.pipeline.comm import gloo
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooPeers
from thinpipe.pipeline.comm.transport import LANES, Peers
from thinpipe.pipeline.wire.header import DesyncError

pytestmark = pytest.mark.dist

SIZES = [0, 15, 16, 17, 63, 64, 65, 1000]
SIZE = 3


def peers_of_all() -> Peers:
    assert dist.group.WORLD is not None
    return GlooPeers((dist.group.WORLD, dist.group.WORLD))


def impatient_peers() -> GlooPeers:
    """Peers that wait for 3 seconds."""
    dist.barrier()  # making the group has the same timeout
    group = dist.new_group(timeout=timedelta(seconds=3))
    return GlooPeers((group, group))


def exchange_all(rank: int) -> dict[str, Any]:
    peers = peers_of_all()
    return {
        "sizes": swap_sizes(peers) and peers.bytes_sent > 2 * sum(SIZES),
        "primitives": (sharded(peers), summed(peers), gathered(peers)),
        "ring": along_ring(peers),
        "too long": send_wrongly(peers_of_all(), 400, 300),
        "apart": send_wrongly(peers_of_all(), 200, 500 + rank),
        "expected": take_expected(peers_of_all()),
        "moved": go_on_in_another_group(rank),
        "silent": wait_for_nothing(impatient_peers()),
    }


def swap_sizes(peers: Peers) -> bool:
    """Whether all messages of all sizes arrived whole."""
    good, others = True, [peer for peer in range(peers.size) if peer != peers.rank]
    for number, nbytes in enumerate(SIZES):
        outgoing = {
            peer: message(nbytes + peer, 100 * number + 10 * peers.rank + peer) for peer in others
        }
        incoming = peers.exchange(outgoing, others, nbytes + 10)
        for peer, found in incoming.items():
            wanted = message(nbytes + peers.rank, 100 * number + 10 * peer + peers.rank)
            good &= torch.equal(found, wanted)
        good &= sorted(incoming) == others
    return good


def send_wrongly(peers: Peers, nbytes: int, capacity: int) -> str:
    """Each sends the next so much."""
    following, before = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    try:
        peers.exchange({following: message(nbytes, 0)}, [before], capacity)
    except DesyncError as error:
        return str(error)
    return ""


def take_expected(peers: Peers) -> bool:
    """Whether messages that are expected arrive in order, of any size up to their capacities."""
    following, before = (peers.rank + 1) % peers.size, (peers.rank - 1) % peers.size
    sizes = [(3, 64), (64, 64), (0, 7), (5, 7)]
    for _, capacity in sizes:
        peers.expect([before], capacity, lane=1)
    good = True
    for nbytes, capacity in sizes:
        found = peers.exchange({following: message(nbytes, nbytes)}, [before], capacity, lane=1)
        good &= torch.equal(found[before], message(nbytes, nbytes))
    return good


def go_on_in_another_group(rank: int) -> bool:
    """Whether an exchange is right after one that failed in its first phase, with more expected."""
    peers = impatient_peers()
    if rank == 0:
        with pytest.raises(TransportError):
            sharded(peers)
    group = dist.new_group()
    peers.reset((group, group))
    return torch.equal(sharded(peers), total(SIZE))


def wait_for_nothing(peers: Peers) -> str:
    """The first replica waits for the second, which is alive but does not send."""
    if peers.rank != 0:
        return ""
    with pytest.raises(TransportError) as caught:
        peers.exchange({}, [1], 300)
    return str(caught.value)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(SIZE, exchange_all)


@pytest.mark.parametrize("which", ["sizes", "expected", "moved"])
def test_messages_arrive_whole(found: list[dict[str, Any]], which: str) -> None:
    """Of any size; as they were expected; in another group after a failure."""
    assert all(one[which] for one in found)


def test_replicas_exchange_with_all_or_with_neighbors(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        check_primitives(SIZE, rank, one["primitives"])
        check_ring(SIZE, rank, one["ring"])


def test_a_message_longer_than_it_can_be_is_rejected(found: list[dict[str, Any]]) -> None:
    assert found[0]["too long"].startswith("replica 2 -> replica 0: a payload of up to 400 bytes")


def test_a_peer_at_another_exchange_is_named_at_once(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        before = (rank - 1) % SIZE
        said = f"a payload of up to {500 + before} bytes, where at most {500 + rank} can be"
        assert one["apart"].startswith(f"replica {before} -> replica {rank}: {said}")


@pytest.mark.parametrize("capacity", [0, 1, 2**29 - 1, 2**29, 2**40])
@pytest.mark.parametrize("lane", range(LANES))
def test_tags_of_payloads_are_those_of_a_lane_and_fit_torch(capacity: int, lane: int) -> None:
    tag = gloo._tag(lane, capacity)
    assert LANES <= tag < 2**31
    assert tag % LANES == lane


def test_a_silent_peer_is_named(found: list[dict[str, Any]]) -> None:
    assert found[0]["silent"].startswith("replica 1 -> replica 0: lost in an exchange: ")
