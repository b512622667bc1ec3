"""The one port of a host: strangers must prove themselves there, a few at a time and quickly.

Where there are too many, the one that has waited longest goes: whoever has the key needs two round
trips, so that a flood must be hundreds a second to keep it out. It cannot keep out a machine that
is in the run already.
"""

import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any

from thinpipe.launch.host.interfaces import plain, serve
from thinpipe.launch.net.overlay.links.handshake import LIMIT_S, Hello, accept
from thinpipe.launch.net.overlay.links.loop import Loop, Task

_MOST, _MOST_OF_ONE = 64, 32
"""Connections that may be unproven at a time: in all, members' aside, and from one address."""
_AT_ONCE = 16  # then other sockets have their turn

OnHello = Callable[[ssl.SSLSocket, Hello, str], None]


class Listener:
    """Accepts connections, and hands on those whose other end has the run's key.

    `rejected` counts the others, by reason, and `on_stranger` hears of each. `is_member` says
    whether an address is one of the run's.
    """

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        context: ssl.SSLContext,
        on_hello: OnHello,
        *,
        is_member: Callable[[str], bool] = lambda _: False,
        on_stranger: Callable[[str, Exception], None] = lambda *_: None,
    ) -> None:
        """Listen; OSError if the address is not this host's, or the port is in use."""
        self.rejected: Counter[str] = Counter()
        self._loop, self._context, self._on_hello = loop, context, on_hello
        self._is_member, self._on_stranger = is_member, on_stranger
        self._unproven: dict[int, tuple[str, Task]] = {}  # by their number; the oldest first
        self._count = 0
        server = serve(address, backlog=256)
        self.port: int = server.getsockname()[1]
        loop.listen(server, self._prove, _AT_ONCE)

    def _make_room(self, source: str) -> None:
        own = [task for other, task in self._unproven.values() if other == source]
        if len(own) >= _MOST_OF_ONE:
            own[0].expire()
        elif not self._is_member(source):
            others = [task for other, task in self._unproven.values() if not self._is_member(other)]
            if len(others) >= _MOST:
                others[0].expire()

    def _prove(self, sock: socket.socket, peer: Any) -> None:
        source = plain(peer[0])
        self._make_room(source)
        self._count += 1
        number = self._count

        def done(found: tuple[ssl.SSLSocket, Hello]) -> None:
            self._unproven.pop(number, None)
            self._on_hello(*found, source)

        def failed(error: Exception) -> None:
            self._unproven.pop(number, None)
            self.rejected[type(error).__name__] += 1
            self._on_stranger(source, error)

        steps = accept(sock, self._context)
        patient = not self._is_member(source)
        task = self._loop.spawn(steps, LIMIT_S, done=done, failed=failed, patient=patient)
        if task in self._loop.tasks:  # it may be done, or have failed, in its first step
            self._unproven[number] = source, task
