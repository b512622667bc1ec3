"""Messages in the background: all come, or whoever waits learns why not."""

from threading import Thread

import pytest
from torch.distributed import HashStore, Store, TCPStore

from thinpipe.launch.checkpoint.store_gather import StoreGather
from thinpipe.pipeline.comm.errors import TransportError


def board(store: Store, rank: int, reason: str = "", *, limit_s: float = 30) -> StoreGather:
    return StoreGather(store, rank, 2, name="saves", limit_s=limit_s, gone=lambda: reason)


def test_all_values_arrive_in_rank_order() -> None:
    store, found = HashStore(), list[object]()
    other = Thread(target=lambda: found.append(board(store, 1).gather("b")))
    other.start()
    assert board(store, 0).gather("a") == ["a", "b"]
    other.join()
    assert found == [["a", "b"]]


def test_a_machine_that_is_gone_is_not_waited_for_and_what_it_said_before_counts() -> None:
    store = HashStore()
    with pytest.raises(TransportError, match="rank 0 did not answer: host0 left the run"):
        board(store, 1, "host0 left the run").gather("b")
    assert board(store, 0, "host1 left the run").gather("a") == ["a", "b"]


def test_the_slowest_is_waited_for_a_limited_time() -> None:
    with pytest.raises(TimeoutError, match="rank 1 did not answer for 0 s"):
        board(HashStore(), 0, limit_s=0.1).gather("a")


def test_a_store_that_is_gone_is_said_to_be() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    del server
    with pytest.raises(TransportError, match="the machine that holds the run's store is gone"):
        board(client, 0).gather("a")
