"""Two links in one process, over real TLS connections that a test can cut, hold up or damage."""

import contextlib
import fcntl
import random
import socket
import ssl
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from tests.ports import free_port
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.links.dialer import Dialer
from thinpipe.launch.net.overlay.links.frames import Traffic
from thinpipe.launch.net.overlay.links.handshake import Hello, Welcome, send
from thinpipe.launch.net.overlay.links.link import Link
from thinpipe.launch.net.overlay.links.listener import Listener
from thinpipe.launch.net.overlay.links.loop import Loop

PORT = 7
_ESTABLISHED = 1


Script = Callable[[bool, int, bytes], bytes]
"""Given whether it goes up, its number in its direction of a connection, and a TLS record: what
passes. Up is from who connects to who accepts."""


class Reset(Exception):  # noqa: N818  raised by scripts
    """The connection is reset when these bytes have come through."""

    def __init__(self, passing: bytes) -> None:
        super().__init__()
        self.passing = passing


class Wire:
    """A TCP proxy that a script rules; `held` stops it, `cut` resets its connections."""

    def __init__(self, target: tuple[str, int], *, held: bool = False) -> None:
        self.script: Script = lambda up, number, record: record
        self.held = threading.Event()
        if held:
            self.held.set()
        self.connections = 0
        self._target, self._open = target, list[Connection]()
        self._scripted = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", free_port()))
        self.address = self._server.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for connection in self._open:
            connection.end(reset=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                with contextlib.ExitStack() as unless_made:
                    unless_made.enter_context(near)
                    far = socket.create_connection(self._target)
                    unless_made.pop_all()
                connection = Connection(near, far)
                self._open.append(connection)
                self.connections += 1
                for up in (True, False):
                    threading.Thread(target=self._pump, args=(connection, up), daemon=True).start()

    def _pump(self, connection: "Connection", up: bool) -> None:
        source, target = connection.ends if up else connection.ends[::-1]
        try:
            for number, record in enumerate(_records(source)):
                while self.held.is_set():
                    time.sleep(0.005)
                with self._scripted:
                    passing = self.script(up, number, record)
                target.sendall(passing)
        except OSError:
            pass
        except Reset as reset:
            with contextlib.suppress(OSError, ValueError):  # closed by the other direction
                target.sendall(reset.passing)
                until(lambda: _has_come(target))
            connection.end(reset=True)
        connection.end()


class Connection:
    """Two sockets that end together, once."""

    def __init__(self, *ends: socket.socket) -> None:
        self.ends = ends
        self._lock, self._over = threading.Lock(), False

    def end(self, *, reset: bool = False) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            for sock in self.ends:
                with contextlib.suppress(OSError):
                    if reset:
                        sock.setsockopt(
                            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                        )
                    # wakes who reads it
                    sock.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
                sock.close()


def _records(sock: socket.socket) -> Iterator[bytes]:
    while len(header := sock.recv(5, socket.MSG_WAITALL)) == 5:
        (length,) = struct.unpack("!H", header[3:])
        body = sock.recv(length, socket.MSG_WAITALL)
        if len(body) < length:
            return
        yield header + body


def _has_come(sock: socket.socket) -> bool:
    """Whether the other end has all that was sent, or wants no more."""
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != _ESTABLISHED or not any(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))


class Pair:
    """Host "a" dials host "b". `events` are what the links report."""

    def __init__(
        self, key: Path, *, patience_s: float = 30.0, held: bool = False, wire: type[Wire] = Wire
    ) -> None:
        self.loop, self.events = Loop(), list[tuple[str, str, str]]()
        self.attempts = 0
        accepting, connecting = keys.contexts(key)
        self._local = socket.create_server(("127.0.0.1", 0))
        self._local.settimeout(PATIENCE_S)
        self._ends: list[socket.socket] = []
        self.a, self.b = (self._link(name, number, patience_s) for number, name in enumerate("ba"))
        self._listener = Listener(self.loop, ("127.0.0.1", 0), accepting, self._on_hello)
        self.wire = wire(("127.0.0.1", self._listener.port), held=held)
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
        self._thread.join(PATIENCE_S)
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
        far.settimeout(PATIENCE_S)
        return far

    def open(
        self, port: int, traffic: Traffic = Traffic.PIPELINE, *, at: Link | None = None
    ) -> socket.socket:
        """A local connection to a port of host "b", or of "a" where it begins at the other link."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname(), timeout=PATIENCE_S)
            inside = server.accept()[0]
        self._ends.append(near)
        self.call(lambda: (at or self.a).open(inside, port, traffic))
        return near

    def without_heartbeats(self) -> None:
        """From now on only what is asked for passes."""
        self.loop.ticks[:] = [self._dialer.tick]
        self.call(lambda: None)  # the present round is over

    def call(self, function: Callable[[], object]) -> None:
        """Call in the loop's thread, once it has seen all that came until now; wait for that."""
        called = threading.Event()

        def run() -> None:
            function()
            called.set()

        self.loop.after(0, lambda: self.loop.after(0, run))  # it may be past its look at sockets
        assert called.wait(PATIENCE_S)

    def _link(self, peer: str, number: int, patience_s: float) -> Link:
        return Link(
            self.loop,
            peer,
            first_stream=number,
            patience_s=patience_s,
            exposed=lambda port: self._local.getsockname() if port == PORT else None,
            on_peer_list=lambda data: None,
            on_change=lambda link, state, why: self.events.append((link.peer, state, why)),
        )

    def _hello(self, attempt: int) -> Hello:
        self.attempts, session = attempt, self.a.session
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
    thread.join(PATIENCE_S)
    return received


def chunks(sock: socket.socket) -> Iterator[bytes]:
    while data := sock.recv(1 << 20):
        yield data


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)
