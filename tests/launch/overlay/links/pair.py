"""Two links in one process, over real TLS connections that a test can cut, hold up or damage."""

import contextlib
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from thinpipe.launch.overlay import keys
from thinpipe.launch.overlay.links.dialer import Dialer
from thinpipe.launch.overlay.links.frames import Traffic
from thinpipe.launch.overlay.links.handshake import Hello, Welcome, send
from thinpipe.launch.overlay.links.link import Link
from thinpipe.launch.overlay.links.listener import Listener
from thinpipe.launch.overlay.links.loop import Loop

PORT = 7


class Wire:
    """A TCP proxy: `damage` may change what passes, `held` stops it, `cut` resets connections."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.damage: Callable[[bytes], bytes] = lambda data: data
        self.held = threading.Event()
        self.connections = 0
        self._target, self._open = target, list[socket.socket]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD)  # wakes who reads it
            sock.close()
        self._open = []

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                self._open.append(near)
                far = socket.create_connection(self._target)
                self._open.append(far)
                self.connections += 1
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while self.held.is_set():
                    time.sleep(0.01)
                target.sendall(self.damage(data))
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class Pair:
    """Host "a" dials host "b". `events` are what the links report."""

    def __init__(self, key: Path, *, patience_s: float = 30.0, wire: type[Wire] = Wire) -> None:
        self.loop, self.events = Loop(), list[tuple[str, str, str]]()
        accepting, connecting = keys.contexts(key)
        self._local = socket.create_server(("127.0.0.1", 0))
        self._local.settimeout(10)
        self._ends: list[socket.socket] = []
        self.a, self.b = (self._link(name, number, patience_s) for number, name in enumerate("ba"))
        self._listener = Listener(self.loop, ("127.0.0.1", 0), accepting, self._on_hello)
        self.wire = wire(("127.0.0.1", self._listener.port))
        self._dialer = Dialer(
            self.loop, connecting, self.a, address=lambda: self.wire.address, hello=self._hello
        )
        self.loop.ticks += [
            lambda now_s: self.a.tick(now_s, self.loop.late_s),
            lambda now_s: self.b.tick(now_s, self.loop.late_s),
            self._dialer.tick,
        ]
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self.a.restart)
        self.call(self.b.restart)
        self.loop.after(0, self.loop.stop)
        self._thread.join(10)
        self.wire.close()
        for sock in [self._local, *self._ends]:
            sock.close()

    def pipe(self, traffic: Traffic = Traffic.PIPELINE) -> tuple[socket.socket, socket.socket]:
        """The two ends of a local connection that leads through both links."""
        near = self.open(PORT, traffic)
        return near, self.accept()

    def accept(self) -> socket.socket:
        """The next connection that comes out at host "b"."""
        far = self._local.accept()[0]
        self._ends.append(far)
        far.settimeout(60)
        return far

    def open(self, port: int, traffic: Traffic = Traffic.PIPELINE) -> socket.socket:
        """A local connection to a port of host "b"."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname(), timeout=60)
            inside = server.accept()[0]
        self._ends.append(near)
        self.call(lambda: self.a.open(inside, port, traffic))
        return near

    def call(self, function: Callable[[], object]) -> None:
        """Call in the loop's thread, and wait for that."""
        called = threading.Event()

        def run() -> None:
            function()
            called.set()

        self.loop.after(0, run)
        assert called.wait(30)

    def _link(self, peer: str, number: int, patience_s: float) -> Link:
        return Link(
            self.loop,
            peer,
            first_stream=number,
            patience_s=patience_s,
            exposed=lambda port: self._local.getsockname() if port == PORT else None,
            on_roster=lambda data: None,
            on_change=lambda link, state, why: self.events.append((link.peer, state, why)),
        )

    def _hello(self, attempt: int) -> Hello:
        session = self.a.session
        return Hello(
            purpose="link",
            name="a",
            attempt=attempt,
            session=session.identity,
            fresh=session.is_fresh,
            received=session.received,
        )

    def _on_hello(self, connection: ssl.SSLSocket, hello: Hello, _source: str) -> None:
        known = self.b.prepare(hello.session, fresh=hello.fresh)
        welcome = Welcome(known=known, received=self.b.session.received)

        def done(_: object) -> None:
            if known and not self.b.connected:
                self.b.use(connection, hello.received)
            else:
                self.loop.close(connection)

        def failed(_: Exception) -> None:
            self.loop.close(connection)

        self.loop.spawn(send(connection, welcome), 5, done=done, failed=failed)


def transfer(source: socket.socket, target: socket.socket, data: bytes) -> bytes:
    """Send everything and the end at one end, while the other receives."""

    def write() -> None:
        source.sendall(data)
        source.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    received = b"".join(chunks(target))
    thread.join(10)
    return received


def chunks(sock: socket.socket) -> Iterator[bytes]:
    while data := sock.recv(1 << 20):
        yield data


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)
