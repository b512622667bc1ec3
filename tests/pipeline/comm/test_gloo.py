"""The gloo transport: control messages between real processes, proved undamaged.

One group of processes does all that they survive; tests look at what it found.
"""

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from thinpipe.pipeline.comm import gloo
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.transport import Scope

pytestmark = pytest.mark.dist


PLACES = [0, 23, 31]
"""Of bytes in a message of three values."""


def all_at_once(rank: int) -> dict[str, Any]:
    return {
        "share": share(rank),
        "gather": gather(rank),
        "damaged": {place: share_damaged(rank, place) for place in PLACES},
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(4, all_at_once)


def share(rank: int) -> dict[Scope, list[list[float]]]:
    transport = GlooTransport(2, 2, timeout_s=60)
    mine = torch.tensor([float(rank), float("nan")], dtype=torch.float64)
    scopes: list[Scope] = ["replica", "stage", "world"]
    return {scope: transport.share(mine, scope)[:, :1].tolist() for scope in scopes}


def test_a_scope_says_who_shares(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        first = 2 * (rank // 2)
        assert one["share"]["replica"] == [[first], [first + 1]]
        assert one["share"]["stage"] == [[rank % 2], [rank % 2 + 2]]
        assert one["share"]["world"] == [[0], [1], [2], [3]]


def gather(rank: int) -> list[bytes]:
    return GlooTransport(4, 1, timeout_s=60).gather(bytes([rank]) * 1000 * rank)


def test_bytes_of_any_length_are_gathered(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["gather"] == [bytes([rank]) * 1000 * rank for rank in range(4)]


def share_damaged(rank: int, place: int) -> str:
    """Rank 0 sends its second vector with one bit flipped."""
    transport, sealed = GlooTransport(4, 1, timeout_s=60), gloo.sealed
    mine = torch.ones(3, dtype=torch.float64)
    transport.share(mine, "world")
    if rank == 0:

        def damaged(data: torch.Tensor, number: int) -> torch.Tensor:
            message = sealed(data, number)
            message[place] ^= 4
            return message

        gloo.sealed = damaged
    try:
        transport.share(mine, "world")
    except TransportError as error:
        return str(error)
    finally:
        gloo.sealed = sealed
    return "no error"


@pytest.mark.parametrize("place", PLACES)
def test_one_flipped_bit_in_a_control_vector_is_an_error(
    found: list[dict[str, Any]], place: int
) -> None:
    fine, *others = (one["damaged"][place] for one in found)
    assert fine == "no error"
    for rank, said in enumerate(others, start=1):
        assert f"rank 0 -> rank {rank}" in said
        assert "message 1 is damaged or not the next" in said
