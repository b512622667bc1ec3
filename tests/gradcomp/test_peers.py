"""Messages between replicas: whole, bounded, in chunks that wait for each other."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gradcomp.replicas import all_of
from tests.ranks import Ranks
from thinpipe.gradcomp.exchange import ExchangeKey, reduce_sharded
from thinpipe.gradcomp.peers import GroupPeers, local_peers
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.header import HEADER_NBYTES, DesyncError, Header


def message(nbytes: int, seed: int) -> Tensor:
    """A valid message with random payload."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(256, (HEADER_NBYTES + nbytes,), generator=generator).to(torch.uint8)
    Header(0, 1, 32, 0, 0, 0, 0, 0, nbytes).write(whole)
    return whole


def peers_of(chunk_nbytes: int) -> GroupPeers:
    assert dist.group.WORLD is not None
    return GroupPeers((dist.group.WORLD, dist.group.WORLD), chunk_nbytes=chunk_nbytes)


def swap_sizes(rank: int, sizes: list[int]) -> tuple[bool, int]:
    peers = peers_of(64)
    good = True
    for number, nbytes in enumerate(sizes):
        others = [peer for peer in range(peers.size) if peer != rank]
        outgoing = {
            peer: message(nbytes + peer, 100 * number + 10 * rank + peer) for peer in others
        }
        incoming = peers.exchange(outgoing, nbytes + 10)
        for peer, found in incoming.items():
            wanted = message(nbytes + rank, 100 * number + 10 * peer + rank)
            good &= torch.equal(found, wanted)
        good &= sorted(incoming) == others
    return good, peers.bytes_sent


@pytest.mark.dist
def test_messages_of_any_size_arrive_whole(ranks: Ranks) -> None:
    sizes = [0, 15, 16, 17, 63, 64, 65, 1000]
    for good, nbytes in ranks(3, swap_sizes, sizes):
        assert good
        assert nbytes > 2 * sum(sizes)


def send_too_much(rank: int) -> str:
    peers = peers_of(256)
    with pytest.raises(DesyncError) as caught:
        peers.exchange({1 - rank: message(400, rank)}, 300)
    return str(caught.value)


@pytest.mark.dist
def test_a_message_longer_than_it_can_be_is_refused(ranks: Ranks) -> None:
    first, _ = ranks(2, send_too_much)
    assert first.startswith("replica 1 -> replica 0: a payload of 400 bytes")


@pytest.mark.dist
def test_a_peer_that_dies_in_an_exchange_is_named_at_once(ranks: Ranks, tmp_path: Path) -> None:
    account = tmp_path / "account"
    with pytest.raises(AssertionError, match="rank 1: ended without a result"):
        ranks(2, die_in_exchange, account)
    seconds, told = account.read_text().split(" ", 1)
    assert float(seconds) < 5
    assert re.match(r"replica . -> replica .: lost in an exchange: (Read|Connection)", told), told
    assert "pair.cc" not in told


def die_in_exchange(rank: int, account: Path) -> None:
    peers = peers_of(64)
    if rank == 1:
        time.sleep(0.3)
        os._exit(1)
    targets = torch.zeros(100).tensor_split(2)
    begin = time.monotonic()
    with pytest.raises(TransportError) as caught:
        reduce_sharded(
            peers,
            ExchangeKey(0, 0, 1),
            targets,
            codec=Cast("fp32"),
            finish=lambda x: x,
        )
    account.write_text(f"{time.monotonic() - begin:.1f} {caught.value}")


def test_a_chunk_has_room_for_a_header() -> None:
    class Unused:
        pass

    group: Any = Unused()
    with pytest.raises(ValueError, match=f"chunk_nbytes = 47: a header takes {HEADER_NBYTES}"):
        GroupPeers(group, chunk_nbytes=47)


def test_an_exchange_of_another_step_is_noticed() -> None:
    pairs = list(enumerate(local_peers(2)))

    def reduce(pair: Any) -> str:
        step, peer = pair
        with pytest.raises(DesyncError) as caught:
            reduce_sharded(
                peer,
                ExchangeKey(step, 0),
                torch.zeros(4).tensor_split(2),
                codec=Cast("fp32"),
                finish=lambda total_n: total_n,
            )
        return str(caught.value)

    first, second = all_of(pairs, reduce)
    assert "exchange with replica 1" in first
    assert "step: peer sent 1, expected 0" in first
    assert "step: peer sent 0, expected 1" in second


def test_a_silent_peer_is_named() -> None:
    first, _ = local_peers(2, timeout_s=0.1)
    with pytest.raises(TransportError, match=r"replica 1 -> replica 0: nothing came in 0\.1 s"):
        first.exchange({1: message(4, 0)}, 4)
