"""The gloo transport: control messages between real processes, proved undamaged."""

import os
import time
from pathlib import Path

import pytest
import torch

from tests.ranks import Ranks
from thinpipe.pipeline.comm import gloo
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.transport import Scope

pytestmark = pytest.mark.dist


def share(rank: int) -> dict[Scope, list[list[float]]]:
    transport = GlooTransport(2, 2, timeout_s=60)
    mine = torch.tensor([float(rank), float("nan")], dtype=torch.float64)
    scopes: list[Scope] = ["replica", "stage", "world"]
    return {scope: transport.share(mine, scope)[:, :1].tolist() for scope in scopes}


def test_a_scope_says_who_shares(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(4, share)):
        first = 2 * (rank // 2)
        assert found["replica"] == [[first], [first + 1]]
        assert found["stage"] == [[rank % 2], [rank % 2 + 2]]
        assert found["world"] == [[0], [1], [2], [3]]


def gather(rank: int) -> list[bytes]:
    return GlooTransport(3, 1, timeout_s=60).gather(bytes([rank]) * 1000 * rank)


def test_bytes_of_any_length_are_gathered(ranks: Ranks) -> None:
    for found in ranks(3, gather):
        assert found == [b"", bytes([1]) * 1000, bytes([2]) * 2000]


def share_damaged(rank: int, place: int) -> str:
    """Rank 0 sends its second vector with one bit flipped."""
    transport = GlooTransport(2, 1, timeout_s=60)
    mine = torch.ones(3, dtype=torch.float64)
    transport.share(mine, "world")
    if rank == 0:
        sealed = gloo.sealed

        def damaged(data: torch.Tensor, number: int) -> torch.Tensor:
            message = sealed(data, number)
            message[place] ^= 4
            return message

        gloo.sealed = damaged
    try:
        transport.share(mine, "world")
    except TransportError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("place", [0, 23, 31])
def test_one_flipped_bit_in_a_control_vector_is_an_error(ranks: Ranks, place: int) -> None:
    fine, found = ranks(2, share_damaged, place)
    assert fine == "no error"
    assert "rank 0 -> rank 1" in found
    assert "message 1 is damaged or not the next" in found


def share_with_dead_peer(rank: int, account: Path) -> None:
    transport = GlooTransport(2, 1, timeout_s=60)
    if rank == 1:
        os._exit(9)
    begin_s = time.monotonic()
    try:
        transport.share(torch.zeros(1), "world")
        transport.share(torch.zeros(1), "world")
    except TransportError as error:
        account.write_text(f"{time.monotonic() - begin_s:.1f} {error}")


def test_a_dead_rank_is_named(ranks: Ranks, tmp_path: Path) -> None:
    account = tmp_path / "account"
    with pytest.raises(AssertionError, match="rank 1: ended without a result"):
        ranks(2, share_with_dead_peer, account)
    seconds, text = account.read_text().split(" ", 1)
    assert float(seconds) < 30, "half of the time after which a silent peer is given up"
    assert "lost in an exchange of control messages" in text
    assert "rank 1" in text
