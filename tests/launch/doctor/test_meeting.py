"""Hosts that come at the same moment, and hosts that go while others still wait."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.ports import free_port
from thinpipe.launch.doctor import meeting
from thinpipe.launch.doctor.meeting import DoctorError, Meeting, meet


def test_whoever_comes_a_moment_later_on_one_machine_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    port, first = free_port(), []

    def open_store(*arguments: Any, **options: Any) -> TCPStore:
        """Another one opens the port in the last moment."""
        if not first:
            first.append(TCPStore("127.0.0.1", port, None, True, wait_for_workers=False))
        return TCPStore(*arguments, **options)

    monkeypatch.setattr(meeting, "TCPStore", open_store)
    alone = meet(("127.0.0.1", port), "127.0.0.1", 1, wait_s=30)
    assert (alone.serves, alone.place) == (False, 0)


def tell_on(told: Meeting) -> None:
    while True:
        told.tell("key", 1)


def test_a_server_that_goes_is_named_to_who_waits_and_who_tells() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    come = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    told = Meeting(come, 0, 2, False, 60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(meet, ("127.0.0.1", server.port), "127.0.0.1", 2, wait_s=60)
        server.get("who/0")
        place = f"127.0.0.1:{server.port}"
        del server
        with pytest.raises(DoctorError, match=f"lost another host while hosts .* to {place}"):
            waiting.result()
    with pytest.raises(DoctorError, match="lost another host while telling 'key'"):
        tell_on(told)
