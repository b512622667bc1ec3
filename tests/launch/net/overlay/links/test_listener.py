"""Strangers at the one open port: rejected, in bounded time and number."""

import contextlib
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, until
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.links import handshake, listener
from thinpipe.launch.net.overlay.links.handshake import Hello
from thinpipe.launch.net.overlay.links.listener import Listener
from thinpipe.launch.net.overlay.links.loop import Loop

TLS_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(300)


class Door:
    def __init__(
        self, folder: Path, is_member: Callable[[str], bool] = lambda source: False
    ) -> None:
        keys.new(folder / "run.key")
        self.folder, self.loop, self.hellos = folder, Loop(), list[Hello]()
        self.listener = Listener(
            self.loop,
            ("127.0.0.1", 0),
            keys.contexts(folder / "run.key")[0],
            self._on_hello,
            is_member=is_member,
        )
        self.port = self.listener.port
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def _on_hello(self, connection: ssl.SSLSocket, hello: Hello, _source: str) -> None:
        self.hellos.append(hello)
        self.loop.close(connection)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def close(self) -> None:
        self.loop.after(0, self.loop.stop)
        self.thread.join(PATIENCE_S)

    def knock(self, key: str = "run.key") -> None:
        """As a member does."""
        self.say_hello(self.connect(), key)

    def say_hello(self, sock: socket.socket, key: str = "run.key") -> None:
        text = Hello(purpose="probe", name="x").model_dump_json().encode()
        context = keys.contexts(self.folder / key)[1]
        with context.wrap_socket(sock) as connection:
            connection.sendall(struct.pack("!I", len(text)) + text)
            connection.recv(1)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path)
    yield door
    door.close()


def test_a_member_comes_in(door: Door) -> None:
    door.knock()
    until(lambda: len(door.hellos) == 1)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        random.Random(0).randbytes(3000),
        TLS_HELLO,
        struct.pack("<Q", 1),
        b"\x00" * 4096,
    ],
    ids=["http", "noise", "half a hello", "gloo", "zeros"],
)
def test_what_is_not_tls_does_not(door: Door, said: bytes) -> None:
    with door.connect() as stranger:
        stranger.sendall(said)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
            stranger.recv(4096)
    until(lambda: door.listener.rejected.total() == 1)
    assert not door.hellos


def test_other_keys_and_older_tls_do_not(door: Door) -> None:
    keys.new(door.folder / "other.key")
    with contextlib.suppress(OSError):
        door.knock("other.key")
    for maximum, certificate in ((ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, False)):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = maximum
        if certificate:
            context.load_cert_chain(door.folder / "run.key")
        with contextlib.suppress(OSError), context.wrap_socket(door.connect()) as connection:
            connection.sendall(b"\0\0\0\2{}")
            connection.recv(1)
    for curve in ("prime256v1", "secp521r1"):  # other groups cost the one who is asked far more
        context = keys.contexts(door.folder / "run.key")[1]
        context.set_ecdh_curve(curve)
        with pytest.raises(ssl.SSLError), context.wrap_socket(door.connect()):
            pass
    until(lambda: door.listener.rejected.total() == 5)
    assert not door.hellos


@pytest.mark.parametrize("text", ["{}", "[]", '{"purpose": "join"}', "x" * 100])
def test_a_member_that_does_not_say_hello_does_not(door: Door, text: str) -> None:
    context = keys.contexts(door.folder / "run.key")[1]
    with context.wrap_socket(door.connect()) as connection:
        connection.sendall(struct.pack("!I", len(text)) + text.encode())
        assert connection.recv(1) == b""
    until(lambda: door.listener.rejected["ValueError"] == 1)


def test_a_length_beyond_reason_is_not_waited_for(door: Door) -> None:
    context = keys.contexts(door.folder / "run.key")[1]
    with context.wrap_socket(door.connect()) as connection:
        connection.sendall(struct.pack("!I", 0xFFFFFFFF))
        assert connection.recv(1) == b""


def test_a_silent_crowd_keeps_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than 32 of one address stand at the door at a time; the oldest make room."""
    monkeypatch.setattr(listener, "LIMIT_S", 600.0)
    crowd = [door.connect() for _ in range(100)]
    until(lambda: door.listener.rejected["TimeoutError"] == 68)
    door.knock()
    until(lambda: len(door.hellos) == 1)
    for stranger in crowd:
        stranger.close()


def test_who_stays_silent_is_sent_away(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    assert handshake.LIMIT_S <= 10
    monkeypatch.setattr(listener, "LIMIT_S", 0.2)
    with door.connect() as stranger:
        assert stranger.recv(1) == b""
    until(lambda: door.listener.rejected == {"TimeoutError": 1})


def test_crowds_from_many_addresses_leave_members_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LIMIT_S", 600.0)  # only those that come later end them
    door = Door(tmp_path, is_member=lambda source: source == "127.0.0.9")
    member = socket.create_connection(("127.0.0.1", door.port), source_address=("127.0.0.9", 0))
    crowd = [
        socket.create_connection(("127.0.0.1", door.port), source_address=(f"127.0.0.{last}", 0))
        for last in range(10, 20)
        for _ in range(20)
    ]
    until(lambda: door.listener.rejected["TimeoutError"] == 200 - 64)
    door.say_hello(member)
    until(lambda: len(door.hellos) == 1)
    for stranger in crowd:
        stranger.close()
    door.close()
