"""Strangers at the one open port: rejected, in bounded time and number."""

import contextlib
import random
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
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
    def __init__(self, folder: Path) -> None:
        keys.new(folder / "run.key")
        self.folder, self.loop, self.hellos = folder, Loop(), list[Hello]()
        context = keys.contexts(folder / "run.key")[0]
        self.listener = Listener(self.loop, ("127.0.0.1", 0), context, self._on_hello)
        self.crowd: list[socket.socket] = []
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def _on_hello(self, connection: ssl.SSLSocket, hello: Hello, _source: str) -> None:
        self.hellos.append(hello)
        self.loop.close(connection)

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """Until the end, if nobody closes it before."""
        place = ("127.0.0.1", self.listener.port)
        self.crowd.append(socket.create_connection(place, PATIENCE_S, (source, 0)))
        return self.crowd[-1]

    def close(self) -> None:
        self.loop.after(0, self.loop.stop)
        self.thread.join(PATIENCE_S)
        for sock in self.crowd:
            sock.close()

    def enter(self, key: str = "run.key", sock: socket.socket | None = None) -> ssl.SSLSocket:
        return keys.contexts(self.folder / key)[1].wrap_socket(sock or self.connect())

    def knock(self, key: str = "run.key", sock: socket.socket | None = None) -> None:
        """As a member does."""
        text = Hello(purpose="probe", name="x").model_dump_json().encode()
        with self.enter(key, sock) as connection:
            connection.sendall(struct.pack("!I", len(text)) + text)
            connection.recv(1)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    door = Door(tmp_path)
    yield door
    door.close()


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


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("{}", 2), ("[]", 2), ('{"purpose": "join"}', 19), ("x" * 100, 100), ("", 0xFFFFFFFF)],
)
def test_a_member_that_does_not_say_hello_does_not(door: Door, text: str, nbytes: int) -> None:
    """A length beyond reason is not waited for."""
    with door.enter() as connection:
        connection.sendall(struct.pack("!I", nbytes) + text.encode())
        assert connection.recv(1) == b""
    until(lambda: door.listener.rejected["ValueError"] == 1)


def test_a_silent_crowd_keeps_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than 32 of one address stand at the door at a time; the oldest make room."""
    monkeypatch.setattr(listener, "LIMIT_S", 600.0)
    for _ in range(100):
        door.connect()
    until(lambda: door.listener.rejected["TimeoutError"] == 68)
    door.knock()
    until(lambda: len(door.hellos) == 1)


def test_who_stays_silent_is_sent_away(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    assert handshake.LIMIT_S <= 10
    monkeypatch.setattr(listener, "LIMIT_S", 0.2)
    with door.connect() as stranger:
        assert stranger.recv(1) == b""
    until(lambda: door.listener.rejected == {"TimeoutError": 1})


def test_crowds_from_many_addresses_leave_members_alone(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LIMIT_S", 600.0)  # only those that come later end them
    monkeypatch.setattr(door.listener, "_is_member", lambda source: source == "127.0.0.9")
    member = door.connect("127.0.0.9")
    for number in range(200):
        door.connect(f"127.0.0.{10 + number // 20}")
    until(lambda: door.listener.rejected["TimeoutError"] == 200 - 64)
    door.knock(sock=member)
    until(lambda: len(door.hellos) == 1)
