"""What frames may hold, and paths that lose large packets."""

import contextlib
import socket
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.launch.net.overlay.links.pair import Connection, Pair, Wire, noise, transfer
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.links.frames import Kind
from thinpipe.launch.net.overlay.membership import Host, PeerList

pytestmark = pytest.mark.dist


def test_the_list_of_thousands_of_hosts_reaches_a_peer(tmp_path: Path) -> None:
    hosts = tuple(
        Host(
            name=f"machine-{number}.of-a-cluster.example",
            address=f"2001:db8:1234:5678:9abc:def0:1234:{number:x}",
            port=29500,
            reachable=True,
            instance="0123456789abcdef",
        )
        for number in range(3000)
    )
    sent = PeerList(run="0a", coordinator="a", needed=len(hosts), hosts=hosts)
    keys.new(tmp_path / "run.key")
    received = SimpleQueue[bytes]()
    with Pair(tmp_path / "run.key") as pair:
        pair.b._on_peer_list = received.put
        pair.call(lambda: pair.a.say(Kind.PEER_LIST, sent.model_dump_json().encode()))
        assert PeerList.model_validate_json(received.get(timeout=60)) == sent


class Tunnel(Wire):
    """Loses what is large, and no ICMP message says so: a connection begins, then it stalls."""

    BEGIN = 8000
    most = 0

    def _pump(self, connection: Connection, up: bool) -> None:
        ends = connection.ends if up else connection.ends[::-1]
        passed = 0
        with contextlib.suppress(OSError):  # also if the other direction has closed it already
            sizes = [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) for s in ends]
            large = min(sizes) > self.most
            while data := ends[0].recv(65536):
                passed += len(data)
                if not large or passed <= self.BEGIN:
                    ends[1].sendall(data)
        connection.end()


@pytest.mark.parametrize(
    ("mtu", "connections"), [(1280, 2), pytest.param(576, 3, marks=pytest.mark.slow)]
)
def test_a_path_that_loses_large_packets_gets_small_ones(
    tmp_path: Path, mtu: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tunnel, "most", mtu - 40)
    keys.new(tmp_path / "run.key")
    data = noise(300_000)
    with Pair(tmp_path / "run.key", wire=Tunnel) as pair:
        near, far = pair.pipe()
        assert transfer(near, far, data) == data
        assert pair.wire.connections >= connections
