"""Machines that each have some ranks of a replica come together, as they come."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from thinpipe.launch.net.ranks.group import come_together
from thinpipe.launch.net.ranks.handshake import HandshakeError
from thinpipe.launch.run.elastic import parts
from thinpipe.launch.run.elastic.parts import bring_together

WHOLE, WAIT_S = 3, 30.0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """Of a run whose rank 0 looks for machines; who is silent for a second is gone."""
    monkeypatch.setattr(parts, "_LOOK_S", 0.1)
    monkeypatch.setattr(parts, "_SILENT_S", 1.0)
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (TCPStore("127.0.0.1", held.port, timeout=timedelta(seconds=5)), WHOLE)
    threading.Thread(target=bring_together, args=arguments, daemon=True).start()
    return held


def came(store: TCPStore, name: str, ranks: int, wait_s: float = WAIT_S) -> tuple[str, int]:
    own = TCPStore("127.0.0.1", store.port)
    return come_together(own, name, ranks, WHOLE, first=True, wait_s=wait_s)


def test_they_have_one_name_and_follow_each_other(store: TCPStore) -> None:
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(came, store, name, ranks) for name, ranks in (("a", 1), ("b", 2))]
        (one, first), (other, second) = (each.result() for each in found)
    assert one == other
    assert (first, second) in [(0, 1), (2, 0)]


def test_one_that_is_gone_is_passed_over(store: TCPStore) -> None:
    with pytest.raises(HandshakeError, match="--ranks = 1: a replica has 3 ranks"):
        came(store, "gone", 1, wait_s=0.3)
    threading.Event().wait(1.5)
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(came, store, name, 1) for name in "abc"]
        places = [each.result() for each in found]
    assert {name for name, _ in places} == {places[0][0]}
    assert sorted(place for _, place in places) == [0, 1, 2]


@pytest.mark.parametrize(
    "said", ["", "3", '["a", "b"]', '["a", 3]', '["a", -1]', '{"a": 1, "b": 2}']
)
def test_what_is_no_machine_holds_up_nobody(store: TCPStore, said: str) -> None:
    store.set(f"parts/came/{store.add('parts/count', 1)}", said)
    store.add("parts/count", 1)  # one that was lost before it said more
    test_they_have_one_name_and_follow_each_other(store)


@pytest.mark.parametrize(("ranks", "whole"), [([1, 2, 2], 4), ([2, 2, 1], 4), ([3, 1], 4)])
def test_some_of_them_are_a_whole_replica(ranks: list[int], whole: int) -> None:
    found = parts._whole([parts._Part(str(place), each) for place, each in enumerate(ranks)], whole)
    assert sum(part.ranks for part in found) == whole


def test_one_that_does_not_fit_waits_for_the_next(store: TCPStore) -> None:
    """Of 2, 2 and 1 ranks, one machine waits on, and comes together with a later one."""
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(came, store, name, ranks) for name, ranks in (("a", 2), ("b", 2))]
        found += [pool.submit(came, store, name, 1) for name in "cd"]
        places = [each.result() for each in found]
    names = [name for name, _ in places]
    assert sorted(names.count(name) for name in {*names}) == [2, 2]
    assert names[0] != names[1]
