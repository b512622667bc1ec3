"""Makes the connections of links, again and again while they have none.

The end that the connections do not start from looks meanwhile whether its peer is still there. A
machine that refuses connections has no relay any more: its link is given up without patience.
"""

import ssl
import time
from collections.abc import Callable
from functools import partial

from thinpipe.launch.net.overlay.links.handshake import (
    LIMIT_S,
    Hello,
    Welcome,
    connect,
    peer_name,
    receive,
)
from thinpipe.launch.net.overlay.links.link import Link
from thinpipe.launch.net.overlay.links.loop import Loop, Steps
from thinpipe.launch.net.overlay.links.tcp import Segments
from thinpipe.launch.net.overlay.settings import SILENT_S

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # failures double the first, up to 0.5
_LOOK_S = 20.0  # while the link works: at a peer that does not answer where it should be
_SHORT_S = 2 * SILENT_S
_REFUSED_S = 0.25  # three tries: a relay that is only busy still accepts connections


class Dialer:
    """Connects a link to its peer; `address` says where that is at the moment.

    `hello` is given the number of the attempt. With one whose purpose is "probe" it only looks
    whether somebody answers there, and with none it does nothing.
    """

    def __init__(
        self,
        loop: Loop,
        context: ssl.SSLContext,
        link: Link,
        *,
        address: Callable[[], tuple[str, int]],
        hello: Callable[[int], Hello | None],
    ) -> None:
        self._loop, self._context, self._link = loop, context, link
        self._address, self._hello = address, hello
        self._dialing = False
        self._due_s, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._attempt = 0
        self._refused_s: float | None = None
        self._segments, self._short_s = Segments(), 0.0
        self._proven: tuple[str, int] | None = None
        """Where the peer has proved to be: only there a refusal means anything."""

    def tick(self, now_s: float) -> None:
        """Try, if there is no connection and the last try was long enough ago."""
        link, address = self._link, self._address()
        if link.connected:
            self._refused_s = None
        elif now_s < self._short_s:  # what stalls does so again, as all is sent again
            self._segments.stalled()
            self._short_s = 0.0
        if link.has_left or self._dialing or now_s < self._due_s:
            return
        hello = self._hello(self._attempt + 1)
        known = self._proven == address or (hello is not None and hello.purpose == "link")
        if hello is None or (link.connected and known):
            return
        self._dialing, self._attempt = True, self._attempt + 1
        steps = self._steps(address, self._attempt)
        failed = partial(self._on_failure, address)
        self._loop.spawn(steps, LIMIT_S, done=self._on_welcome, failed=failed)

    def _steps(
        self, address: tuple[str, int], attempt: int
    ) -> Steps[tuple[ssl.SSLSocket, Hello, Welcome]]:
        def hello() -> Hello:
            said = self._hello(attempt)  # now: frames may have come while TCP and TLS were set up
            if said is None:
                raise ValueError("the peer cannot be reached from here any more")
            return said

        connection, said = yield from connect(address, self._context, hello, self._segments)
        try:
            if peer_name(connection) not in (None, self._link.peer):
                raise ValueError(f"another host is where {self._link.peer} was")
            self._proven = address
            return connection, said, (yield from receive(connection, Welcome))
        except BaseException:
            self._loop.close(connection)
            raise

    def _on_welcome(self, found: tuple[ssl.SSLSocket, Hello, Welcome]) -> None:
        connection, said, welcome = found
        self._dialing, link = False, self._link
        self._refused_s = None
        if said.purpose == "probe":
            self._loop.close(connection)
            self._wait(_LONGEST_PAUSE_S)
            return
        if welcome.rejected or not welcome.known or said.session != link.session.identity:
            self._loop.close(connection)
            if welcome.rejected:
                self._wait(_LONGEST_PAUSE_S)
            else:  # the peer was restarted, or has given up on this host
                link.give_up("no longer knows this connection")
            return
        self._due_s, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._short_s = time.monotonic() + _SHORT_S
        link.use(connection, welcome.received)

    def _on_failure(self, address: tuple[str, int], error: Exception) -> None:
        self._dialing = False
        if isinstance(error, TimeoutError):
            self._segments.stalled()
        refused = isinstance(error, ConnectionRefusedError)
        self._note_refusal(meant=refused and address == self._proven)
        self._wait(_LOOK_S if self._link.connected else self._pause_s)
        self._pause_s = min(_LONGEST_PAUSE_S / 2, 2 * self._pause_s)

    def _note_refusal(self, *, meant: bool) -> None:
        now_s = time.monotonic()
        if not meant:
            self._refused_s = None
        elif self._refused_s is None:
            self._refused_s = now_s
        elif now_s - self._refused_s > _REFUSED_S and not (
            self._link.connected or self._link.is_lost
        ):
            self._link.give_up("its relay has ended: that machine refuses connections")

    def _wait(self, pause_s: float) -> None:
        self._due_s = time.monotonic() + pause_s
