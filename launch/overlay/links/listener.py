"""The one port of a host: strangers must prove themselves there, a few at a time and quickly."""

import errno
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable

from thinpipe.launch.overlay.links.handshake import LIMIT_S, Hello, accept
from thinpipe.launch.overlay.links.loop import READ, Loop

_MOST, _MOST_OF_ONE = 64, 32
"""Connections that may be unproven at a time, in all and from one address."""
_AT_ONCE = 16
_PAUSE_S = 0.01

OnHello = Callable[[ssl.SSLSocket, Hello, str], None]


class Listener:
    """Accepts connections, and hands on those whose other end has the run's key.

    `refused` counts the others, by reason.
    """

    def __init__(
        self, loop: Loop, address: tuple[str, int], context: ssl.SSLContext, on_hello: OnHello
    ) -> None:
        """Listen.

        Raises:
            OSError: the address is not this host's, or the port is in use.
        """
        self.refused: Counter[str] = Counter()
        self._loop, self._context, self._on_hello = loop, context, on_hello
        self._strangers: Counter[str] = Counter()
        self._server = socket.create_server(address, backlog=256)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        loop.watch(self._server, READ, self._on_event)

    def _on_event(self, _events: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, (source, _port) = self._server.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(_PAUSE_S)  # the port stays readable
                return
            if self._strangers.total() >= _MOST or self._strangers[source] >= _MOST_OF_ONE:
                self.refused["too many at once"] += 1
                sock.close()
            else:
                self._prove(sock, source)

    def _prove(self, sock: socket.socket, source: str) -> None:
        def over() -> None:
            self._strangers[source] -= 1
            if not self._strangers[source]:
                del self._strangers[source]

        def done(found: tuple[ssl.SSLSocket, Hello]) -> None:
            over()
            self._on_hello(*found, source)

        def failed(error: Exception) -> None:
            over()
            self.refused[type(error).__name__] += 1

        self._strangers[source] += 1
        self._loop.spawn(accept(sock, self._context), LIMIT_S, done=done, failed=failed)
