"""Hosts that join at the same time, and hosts that are lost while others wait."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from tests.ports import free_port
from thinpipe.launch.config.network import NetworkConfig
from thinpipe.launch.doctor.group import DoctorError, HostGroup, join_group
from thinpipe.launch.net.machines import several_machines
from thinpipe.launch.net.ranks.network import HostNetwork


def place(port: int) -> HostNetwork:
    """On loopback, where somebody else holds the store."""
    address = "127.0.0.1"
    return HostNetwork(f"{address}:{port}", address, (address, port), None, [address], "name")


def test_of_two_processes_on_a_machine_the_first_holds_the_store() -> None:
    config, endpoint = NetworkConfig(), f"127.0.0.1:{free_port()}"
    first, second = (
        several_machines(config, endpoint, 2, limit_s=120, log=print) for _ in range(2)
    )
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda net: join_group(net, 2, wait_s=120), (first, second)))
    assert [group.is_server for group in groups] == [True, False]
    assert {group.index for group in groups} == {0, 1}


def publish_repeatedly(group: HostGroup) -> None:
    while True:
        group.publish("key", 1)


def test_a_lost_server_is_named_to_hosts_that_wait_and_publish() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    joined = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    connected = HostGroup(joined, 0, 2, False, 60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(join_group, place(server.port), 2, wait_s=60)
        server.get("host/0")
        endpoint = f"127.0.0.1:{server.port}"
        del server
        with pytest.raises(DoctorError, match=f"lost another host while .* at {endpoint}"):
            waiting.result()
    with pytest.raises(DoctorError, match="lost another host while publishing 'key'"):
        publish_repeatedly(connected)
