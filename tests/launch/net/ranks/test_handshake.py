"""Ranks agree before step 0, or do not start and say who differs in what."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from tests.ports import free_port
from tests.ranks import run_ranks
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.host.packages import versions
from thinpipe.launch.net.ranks import handshake
from thinpipe.launch.net.ranks.handshake import HandshakeError, Lobby, agree, fresh_name, open_store
from thinpipe.pipeline.comm.gloo import GlooTransport

pytestmark = pytest.mark.dist


def meet(rank: int, world: int, facts: list[dict[str, object]], wait_s: float = 60) -> object:
    try:
        return agree(_get_default_store(), rank, world, facts[rank], problem=None, wait_s=wait_s)
    except HandshakeError as error:
        return str(error)


def test_every_rank_gets_the_same_run_id_or_names_the_one_that_differs() -> None:
    first, second, third = run_ranks(3, meet, 3, [{"config": {"a": [1, 2]}}] * 3)
    assert first == second == third
    assert isinstance(first, int)
    facts = [{"config": {"lr": 1, "x": {"y": 2}}}, {"config": {"lr": 1, "x": {"y": 3}}}]
    for reported in run_ranks(2, meet, 2, facts):
        assert reported.endswith("rank 1 has x.y = 3, rank 0 has 2")


@pytest.mark.slow
def test_whoever_holds_the_store_leaves_after_the_slowest_has_read() -> None:
    """The ranks are threads: rank 1 has published its facts and stops before it reads others'."""
    store = dist.HashStore()
    board = PrefixStore("handshake", store)
    board.set("facts/1", json.dumps([None, {"lr": 2}]))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(agree, store, 0, 2, {"lr": 1}, problem=None, wait_s=60)
        assert first in wait([first], timeout=7).not_done
        board.set("read/1", "")
        with pytest.raises(HandshakeError, match="rank 1 has lr = 2, rank 0 has 1"):
            first.result()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_named(rank: int) -> None:
    store = dist.HashStore()
    PrefixStore("handshake", store).set(f"facts/{1 - rank}", json.dumps([None, {}]))
    with pytest.raises(HandshakeError, match=r"^rank 2 did not join within 0 s"):
        agree(store, rank, 3, {}, problem=None, wait_s=0.1)


def test_ranks_say_at_once_for_whom_they_wait_and_why_it_is_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand with a wrong WORLD_SIZE: two of four have come, and no more will."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(handshake, "_SAY_S", 0.0)
    said: dict[int, list[str]] = {0: [], 2: []}
    why = {0: "4 processes were started", 2: None}  # on rank 2 as well, if it is a wrong number
    place = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    absent = f"ranks 1, 3 did not join within .* s; are they started, and can they reach {place}"

    def come(rank: int) -> None:
        lobby = Lobby(4, PATIENCE_S, said[rank].append, why[rank])
        with lobby.connecting():
            store = open_store(rank, wait_s=PATIENCE_S)
        with pytest.raises(HandshakeError, match=f"^{f'{why[0]}; ' * (rank == 0)}{absent}"):
            fresh_name(store, rank, 4, lobby, wait_s=3 if rank == 0 else PATIENCE_S)

    with ThreadPoolExecutor(1) as ranks:
        second = ranks.submit(come, 2)
        until(lambda: said[2])  # there is no store yet
        come(0)
        second.result()
    where = f"of 4 (WORLD_SIZE) at {place}, "
    assert said[2][0].startswith(f"waiting for rank 0 {where}24")
    assert said[2][-1].startswith(f"waiting for ranks 1, 3 {where}2")
    last = said[0][-1]
    assert last.startswith(f"{why[0]}; waiting to tell ranks 1, 3 {where}2")
    assert last.endswith(" s left (pipeline.peer_timeout_s)")


def test_a_first_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port, start_s = free_port(), time.monotonic()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    said = f"^rank 0 did not join within 0 s; is it started, and can it reach 127.0.0.1:{port}"
    with pytest.raises(HandshakeError, match=said):
        open_store(1, wait_s=0.1)
    assert time.monotonic() - start_s < 60  # the store's own patience is 300 s


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken.port))
    place = re.escape(f"rank 0 cannot listen at 127.0.0.1:{taken.port}: ")
    with pytest.raises(HandshakeError, match=f"{place}.*MASTER_PORT that nothing uses there"):
        open_store(0, wait_s=3)


def test_a_place_that_is_not_set_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ValueError, match=r"MASTER_PORT is not set.*torchrun"):
        open_store(1, wait_s=3)


def test_a_restart_does_not_see_what_was_written_before() -> None:
    store = dist.HashStore()
    lobby = PrefixStore("lobby", store)

    def answer() -> bytes:
        """What rank 0 told rank 1 last."""
        return lobby.get(f"welcome/1/{lobby.get('hello/1').decode()}")

    def life(number: int) -> list[tuple[str, bool]]:
        """Two ranks in turns of a restarted run; the first takes the second of before for one."""
        before = answer() if number else b""

        def come(rank: int) -> tuple[str, bool]:
            if rank == 1 and number:
                until(lambda: answer() != before)
            fresh = PrefixStore(fresh_name(store, rank, 2, Lobby(2, 60, str), wait_s=60), store)
            clean = not fresh.check([f"address of {rank}"])
            fresh.set(f"address of {rank}", f"{number}")
            return fresh.get(f"address of {1 - rank}").decode(), clean

        with ThreadPoolExecutor(2) as ranks:
            return list(ranks.map(come, range(2)))

    for number in range(3):
        assert life(number) == [(str(number), True)] * 2
    with pytest.raises(HandshakeError, match="rank 1 did not join within 0 s"):
        fresh_name(store, 0, 2, Lobby(2, 0.2, str), wait_s=0.2)


def wrong_world(rank: int) -> str:
    with pytest.raises(ValueError, match="2 processes were started") as caught:
        GlooTransport(3, 1, timeout_s=120)
    return str(caught.value)


def test_a_world_of_the_wrong_size_is_rejected() -> None:
    assert "start that many" in run_ranks(2, wrong_world)[0]


def test_versions_are_those_of_the_packages() -> None:
    assert set(versions()) == {"thinpipe", "torch", "python"}
