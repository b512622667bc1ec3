"""Links and channels between real processes: frames are checked, lost peers are named.

One group of processes does all that ends well, one thing after the other, each on a channel of its
own; tests look at what it found.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.single_process import LoopbackLink
from tests.gradcomp.exchanges import message
from tests.ranks import run_ranks
from tests.waiting import until
from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.pipeline.comm.boundary import Stateless, raw
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooPeers, GlooTransport
from thinpipe.pipeline.comm.gloo_link import GlooLink
from thinpipe.pipeline.comm.message import MessageCodec
from thinpipe.pipeline.wire.cast import Cast, CastFormat
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES
from thinpipe.pipeline.wire.header import DesyncError
from thinpipe.pipeline.wire.told import FORWARD

pytestmark = pytest.mark.dist

SHAPE = torch.Size((2, 3, 8))


@dataclass(frozen=True)
class SameSize(Cast):
    """Another codec whose messages are as long as fp32's."""

    format: CastFormat = "fp32"

    @property
    def codec_id(self) -> int:
        return 99


IDS = torch.tensor([4, 9])


def link_to(rank: int, channel: int = 0) -> GlooLink:
    assert dist.group.WORLD is not None
    link = GlooLink(dist.group.WORLD, rank, channel=channel, name="stage 0 -> stage 1")
    link.begin_pass(0)
    return link


def codec(**changes: Any) -> MessageCodec:
    settings: dict[str, Any] = {"cut": 6, "run_id": 5, "boundaries": {"train": raw()}} | changes
    return MessageCodec(direction=FORWARD, **settings)


WRONG: list[tuple[dict[str, Any], torch.Tensor, str]] = [
    ({}, IDS, "received"),
    ({"cut": 4}, IDS, "cut: peer sent 6, expected 4"),
    ({"run_id": 8}, IDS, "run_id: peer sent 5, expected 8"),
    ({}, torch.tensor([9, 4]), "ids_crc: peer sent"),
    ({"boundaries": {"train": Stateless(SameSize())}}, IDS, "codec_id: peer sent 1, expected 99"),
]
"""What the receiver expects, and what it says."""


def all_at_once(rank: int) -> dict[str, list[Any]]:
    return {
        "wrong": [exchange(rank, number, *case[:2]) for number, case in enumerate(WRONG)],
        "forgetful": [forgetful(rank, who) for who in range(2)],
        "order": flood(rank),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return run_ranks(2, all_at_once)[1]


def exchange(rank: int, number: int, receiver: dict[str, Any], ids: torch.Tensor) -> str:
    """Rank 0 sends a microbatch; rank 1 expects what `receiver` and `ids` say."""
    link = link_to(1 - rank, 10 + number)
    if rank == 0:
        link.send(0, codec().encode(0, torch.ones(SHAPE), IDS))
        link.begin_pass(1)
        return "sent"
    made = codec(**receiver)
    link.expect(0, made.capacity(SHAPE))
    try:
        made.decode(0, link.take(0), ids, SHAPE)
    except DesyncError as error:
        return str(error)
    return "received"


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_wrong_frame_is_rejected_with_both_values(found: dict[str, Any], number: int) -> None:
    assert WRONG[number][2] in found["wrong"][number]


def forgetful(rank: int, who: int) -> str:
    """Two visits under AQ-SGD; before the second, one end loses its memory."""
    uniform = AqsgdConfig(bits=2, delta="uniform", first_visit=8)
    boundary = build_delta(uniform, width=SHAPE[-1], key=0)
    link, made = link_to(1 - rank, 20 + who), codec(boundaries={"train": boundary})
    for visit in range(2):
        link.begin_pass(visit)
        made.begin_pass(step=visit, mode="train")
        if visit == 1 and rank == who:
            boundary.load_state_dict(build_delta(uniform, width=8, key=0).state_dict())
        try:
            if rank == 0:
                link.send(0, made.encode(0, torch.ones(SHAPE), IDS))
            else:
                link.expect(0, made.capacity(SHAPE))
                made.decode(0, link.take(0), IDS, SHAPE)
        except DesyncError as error:
            return str(error)
        boundary.finish_step(keep=True)
    link.begin_pass(2)
    return "no error"


@pytest.mark.parametrize(("who", "sent", "expected"), [(0, 60, 24), (1, 24, 60)])
def test_a_lost_memory_is_a_desync_not_a_crash(
    found: dict[str, Any], who: int, sent: int, expected: int
) -> None:
    assert f"length: peer sent {sent}, expected {expected}" in found["forgetful"][who]


Wait = Callable[[], object]


def on_a_link(rank: int) -> Wait:
    link = link_to(1 - rank)
    if rank == 0:
        link.expect(0, 100)
    return lambda: link.take(0)


def for_a_vector(rank: int) -> Wait:
    transport = GlooTransport(2, 1, timeout_s=60)
    return lambda: [transport.share(torch.zeros(1), "world") for _ in range(2)]


def in_an_exchange(rank: int) -> Wait:
    assert dist.group.WORLD is not None
    peers = GlooPeers((dist.group.WORLD, dist.group.WORLD))
    return lambda: peers.exchange({1: message(1000, 0)}, [1], 1000)


def peer_dies(rank: int, account: Path, begin: Callable[[int], Wait]) -> None:
    wait, waits = begin(rank), account.with_name("waits")
    if rank == 1:
        until(waits.exists)
        if begin is in_an_exchange:
            dist.recv(torch.empty(EXCHANGE_HEADER_NBYTES, dtype=torch.uint8), 0)
        os._exit(9)
    start = time.monotonic()
    waits.touch()
    try:
        wait()
    except TransportError as error:
        account.write_text(f"{time.monotonic() - start:.1f} {error}")


@pytest.mark.parametrize(
    ("begin", "edge"),
    [
        (on_a_link, "stage 0 -> stage 1: lost while waiting for microbatch 0 "),
        (for_a_vector, "rank (0 -> rank 1|1 -> rank 0): lost in an exchange of control messages: "),
        (in_an_exchange, "replica (0 -> replica 1|1 -> replica 0): lost in an exchange: "),
    ],
)
def test_a_dead_peer_is_noticed_in_seconds_and_the_edge_named(
    tmp_path: Path, begin: Callable[[int], Wait], edge: str
) -> None:
    account = tmp_path / "account"
    with pytest.raises(AssertionError, match="rank 1: ended without a result"):
        run_ranks(2, peer_dies, account, begin)
    seconds, reported = account.read_text(encoding="utf-8").split(" ", 1)
    assert float(seconds) < 30  # a silent peer has 60 or 120
    assert re.match(edge, reported)
    assert "pair.cc" not in reported


def flood(rank: int) -> list[float]:
    """Messages sent in one order and taken in another, over two passes."""
    link, found = link_to(1 - rank, 30), list[float]()
    for number in range(2):
        link.begin_pass(number)
        for slot in range(8):
            if rank == 1:
                link.expect(slot, 1000 + slot)
        for slot in reversed(range(8)):
            if rank == 0:
                link.send(slot, torch.full((1000 + slot,), 10 * number + slot, dtype=torch.uint8))
        if rank == 1:
            found += [float(link.take(slot).float().mean()) for slot in (3, 1, 0, 2, 7, 6, 5, 4)]
    link.begin_pass(2)
    return found


def test_messages_find_their_slot_whatever_the_order(found: dict[str, Any]) -> None:
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    assert found["order"] == [*order, *(10 + slot for slot in order)]


def test_loopback_rejects_what_was_not_announced() -> None:
    link = LoopbackLink(patience_s=0)
    link.expect(0, 10)
    with pytest.raises(TransportError, match="up to 10 bytes of microbatch 0, got nothing"):
        link.take(0)
    link.expect(1, 10)
    link.send(1, torch.zeros(11, dtype=torch.uint8))
    with pytest.raises(TransportError, match="got 11 bytes"):
        link.take(1)
