"""Hosts that join at the same time, and hosts that are lost while others wait."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.ports import free_port
from thinpipe.launch.doctor import group
from thinpipe.launch.doctor.group import DoctorError, HostGroup, join_group


def test_a_process_that_finds_the_port_taken_on_its_own_machine_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, first = free_port(), []

    def open_store(*arguments: Any, **options: Any) -> TCPStore:
        """Another process opens the port just before."""
        if not first:
            first.append(TCPStore("127.0.0.1", port, None, True, wait_for_workers=False))
        return TCPStore(*arguments, **options)

    monkeypatch.setattr(group, "TCPStore", open_store)
    alone = join_group(("127.0.0.1", port), "127.0.0.1", 1, wait_s=30)
    assert (alone.is_server, alone.index) == (False, 0)


def publish_repeatedly(group: HostGroup) -> None:
    while True:
        group.publish("key", 1)


def test_a_lost_server_is_named_to_hosts_that_wait_and_publish() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    joined = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    connected = HostGroup(joined, 0, 2, False, 60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join_group, ("127.0.0.1", server.port), "127.0.0.1", 2, wait_s=60)
        server.get("host/0")
        endpoint = f"127.0.0.1:{server.port}"
        del server
        with pytest.raises(DoctorError, match=f"lost another host while .* at {endpoint}"):
            waiting.result()
    with pytest.raises(DoctorError, match="lost another host while publishing 'key'"):
        publish_repeatedly(connected)
