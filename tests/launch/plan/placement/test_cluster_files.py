"""Files that describe a cluster, and what is said of those that are wrong."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.host.network import Host, Network
from thinpipe.launch.plan.placement.cluster import Cluster
from thinpipe.launch.plan.placement.cluster_files import parse_cluster, read_cluster

DOCTOR = {"rate_bps": [[None, 2e6], [1e6, None]], "latency_s": [[0, 0.1], [0.2, 0]]}
DTFM = {"labels": ["a", "a"], "latency_ms": [[0, 5], [5, 0]], "gbps": [[2, 1.5], [1.5, 2]]}
REGIONS = {
    "regions": {"Ohio": 2, "Tokyo": {"hosts": 1, "devices": 2, "speed": 0.5, "memory_gb": 16}},
    "inside": {"latency_ms": 5, "gbps": 2},
    "links": [["Ohio", "Tokyo", 130, 0.7, 0.5]],
}


def test_links_differ_by_direction() -> None:
    found = parse_cluster(DOCTOR)
    assert found.rate_HH[0, 1] == 2e6 * PAYLOAD_SHARE
    assert found.rate_HH[1, 0] == 1e6 * PAYLOAD_SHARE
    assert found.latency_HH.tolist() == [[0, 0.1], [0.2, 0]]
    assert [host.name for host in found.hosts] == ["host0", "host1"]


def test_what_a_network_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    speeds = {"a": 1.0, "b": 0.5, "c": 2.0}
    known = tuple(Host(name=name, speed=speed) for name, speed in speeds.items())
    network = dataclasses.replace(Network.uniform(3, 5e6, 0.01), known=known)
    network.write(path)
    found, direct = read_cluster(path), Cluster.of(network)
    assert found.seen_from("b").speed_D.tolist() == [2, 1, 4]
    assert found.seen_from("elsewhere").speed_D.tolist() == [1, 0.5, 2]
    assert [host.name for host in found.hosts] == ["a", "b", "c"]
    assert Network.read(path).rate_bps[0][1] == 5e6
    assert (found.rate_HH == direct.rate_HH).all()
    assert (found.latency_HH == direct.latency_HH).all()
    again = found.network([0, 1])
    assert again.rate_bps[0][1] == pytest.approx(5e6)


def test_regions_have_hosts_with_devices() -> None:
    found = parse_cluster(REGIONS)
    assert [host.name for host in found.hosts] == ["Ohio-0", "Ohio-1", "Tokyo-0"]
    assert [host.site for host in found.hosts] == ["Ohio", "Ohio", "Tokyo"]
    assert found.devices == 4
    assert found.speed_D.tolist() == [1, 1, 0.5, 0.5]
    assert found.memory_D.tolist() == [math.inf, math.inf, 16e9, 16e9]
    assert found.rate_DD[2, 3] == math.inf
    assert (found.rate_DD[0, 2], found.rate_DD[2, 0]) == (0.7e9, 0.5e9)
    assert found.latency_DD[1, 3] == pytest.approx(0.13)
    names = [found.device_name(device) for device in (1, 2, 3)]
    assert names == ["Ohio-1", "Tokyo-0:0", "Tokyo-0:1"]


def test_dtfm_matrices_hold_payload() -> None:
    found = parse_cluster(DTFM)
    assert found.rate_HH[0, 1] == 1.5e9
    assert [host.site for host in found.hosts] == ["a", "a"]


NONE = {"name": "b", "devices": 0}
BAD = [
    (DTFM | {"gbps": [[2, -1], [1, 2]]}, "link d0 -> d1: rate -1e.09 bit/s; measure it"),
    (DTFM | {"gbps": [[2, None], [1, 2]]}, "link d0 -> d1: rate nan bit/s"),
    (DTFM | {"latency_ms": [[0, -1], [0, 0]]}, "link d0 -> d1: latency -0.001 s"),
    (DOCTOR | {"hosts": ["a", "a"]}, "host 'a': named twice"),
    (DOCTOR | {"hosts": ["a", NONE]}, r"hosts\[1\].devices = 0: input should be greater"),
    (REGIONS | {"links": []}, "no link between Ohio and Tokyo; add one to links"),
    (REGIONS | {"links": [["Ohio", "Paris", 1, 1]]}, "'Paris' is no region; use one of Ohio"),
    (REGIONS | {"links": [["Ohio", "Tokyo"]]}, "write two regions, milliseconds and Gbit/s"),
    (REGIONS | {"regions": {"Ohio": 0}}, "regions.Ohio.hosts = 0: input should be greater than or"),
    (REGIONS | {"regions": {}}, "regions = {}: dictionary should have at least 1 item"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_wrong_files_are_rejected(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as rejected:
        read_cluster(path)
    assert str(rejected.value).startswith(str(path))
