"""Networks from numbers and files."""

from pathlib import Path

import pytest

from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.host.network import Network
from thinpipe.launch.lab.spec import NetworkSpec

MBIT = 1e6


def test_a_file_is_read_back_and_can_be_emulated(tmp_path: Path) -> None:
    network = Network(((None, 2 * MBIT), (4 * MBIT, None)), ((0.0, 0.01), (0.02, 0.0)))
    network.write(tmp_path / "net.json")
    assert Network.read(tmp_path / "net.json") == network
    replayed = NetworkSpec.of(matrix=tmp_path / "net.json")
    assert (replayed.rate_bps(1, 0), replayed.delay_s[1, 0]) == (4 * MBIT, 0.02)


def test_links_within_a_host_are_unlimited() -> None:
    network = Network.uniform(2, MBIT, 0.01).for_ranks(4)
    assert network.rate_bps[0] == (None, None, MBIT, MBIT)
    assert network.latency_s[3] == (0.01, 0.01, 0.0, 0.0)
    assert network.uplink_s(0, 125_000) == 0.0  # within a host


def test_payload_rates_exclude_headers() -> None:
    assert Network.uniform(2, MBIT).payload().link_s(0, 1, 125_000) == 1 / PAYLOAD_SHARE


def test_wrong_networks_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"3 hosts, among which 4 ranks cannot"):
        Network.uniform(3).for_ranks(4)
    with pytest.raises(ValueError, match=r"--network = .*nowhere"):
        Network.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not JSON"),
        ("[]", r"the file = \[\]: input should be a JSON object"),
        ('{"rates": []}', "'rates' is unknown; use hosts, latency_s, rate_bps"),
        ("{}", "rate_bps, latency_s or both"),
        ('{"rate_bps": [[0, 1], [1]]}', "not square"),
        ('{"rate_bps": [[0, "fast"], [1, 0]]}', r"rate_bps\[0\]\[1\] = 'fast'"),
        ('{"rate_bps": [[0, 7], [1e6, 0]]}', r"rate_bps\[0\]\[1\] = 7.0: use 8kbit to 30gbit"),
        (
            '{"rate_bps": [[0, 1e6], [1e6, 0]], "hosts": ["a"]}',
            "hosts lists 1, the matrices have 2",
        ),
        (
            '{"rate_bps": [[0]], "hosts": [{"name": "b", "speed": 0}]}',
            r"hosts\[0\].speed = 0: input",
        ),
        ('{"rate_bps": [[0]], "hosts": [{"nome": "b"}]}', r"hosts\[0\].name: field required"),
        ('{"latency_s": [[0, 60], [0, 0]]}', "0s to 10s"),
        ('{"latency_s": [[0]], "rate_bps": [[0, 1], [1, 0]]}', "needs 2 rows, one per sender"),
    ],
)
def test_a_wrong_file_is_rejected(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "net.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Network.read(path)
