import os
import socket

import pytest

from thinpipe.launch.net.ranks import gloo_backend


def test_looking_at_sockets_leaves_no_descriptor_behind() -> None:
    """Also of those that are none: a rank looks at each loss, and would run out of them."""
    with socket.create_server(("127.0.0.1", 0)) as server, open(os.devnull, "rb"):
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
            before = os.listdir("/proc/self/fd")
            assert port in gloo_backend._listening("127.0.0.1")
            gloo_backend.break_connections({port})
            assert client.recv(1) == b""
            assert os.listdir("/proc/self/fd") == before
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


def test_the_store_stays_connected_if_a_peer_elsewhere_has_its_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with (
            socket.create_connection(("127.0.0.1", port)) as client,
            server.accept()[0] as accepted,
        ):
            gloo_backend.break_connections({port})
            accepted.sendall(b"x")
            assert client.recv(1) == b"x"
