"""Where the hosts of a run join: each learns the others when all have come."""

import ssl
import time
from collections.abc import Callable, Collection
from functools import partial

from thinpipe.launch.net.overlay.joining import REPEAT_S
from thinpipe.launch.net.overlay.links.handshake import LIMIT_S, Hello, Welcome, connect, send
from thinpipe.launch.net.overlay.links.loop import Loop
from thinpipe.launch.net.overlay.links.tcp import Segments
from thinpipe.launch.net.overlay.membership import OWN_NAMES, Host, Membership, PeerList

_PROBE_S = 3.0  # the host waits for it, `_WELCOME_S` (joining.py) at most; firewalls never answer


class Coordinator:
    """Admits hosts to `membership`; `on_change` is called when that has changed."""

    def __init__(
        self,
        loop: Loop,
        context: ssl.SSLContext,
        membership: Membership,
        on_change: Callable[[], None],
    ) -> None:
        self._loop, self._context = loop, context
        self._membership, self._on_change = membership, on_change
        self._joining: dict[str, _Joining] = {}

    def rejection(
        self, hello: Hello, *, connected: bool, lost: Collection[str] = ()
    ) -> Welcome | None:
        """Why a host cannot join; `connected`: one of its name is in the run and well.

        It may have the name of one that is `lost`.
        """
        known = self._joining.get(hello.name)
        other = known if known is not None and known.instance != hello.instance else None
        if connected or (other is not None and not other.has_left()):
            text = f"another machine is named {hello.name!r}, or this one was started twice; "
            return Welcome(rejected=text + OWN_NAMES, again=True)  # or its connection broke
        text = self._membership.rejection(hello)
        place = self._membership.place(hello, {*lost} - self._joining.keys())
        later = self._membership.is_spare(hello)
        return Welcome(rejected=text, place=place, later=later) if text else None

    def admit(self, connection: ssl.SSLSocket, hello: Hello, source: str) -> None:
        """A host joins: see whether it can be reached, then enter it."""
        enter = partial(self._enter, connection, hello, source)
        if not hello.port:
            enter(reachable=False)
            return
        probe = Hello(purpose="probe", name=self._membership.name)
        # of the smallest segments: large packets may be dropped, and only an answer counts
        steps = connect((source, hello.port), self._context, lambda: probe, Segments(level=-1))

        def reached(found: tuple[ssl.SSLSocket, Hello]) -> None:
            self._loop.close(found[0])
            enter(reachable=True)

        self._loop.spawn(steps, _PROBE_S, done=reached, failed=lambda _: enter(reachable=False))

    def tick(self) -> None:
        """Tell hosts that wait who else has joined; they leave when they know all."""
        peer_list = self._membership.peer_list
        for name, joining in list(self._joining.items()):
            if joining.sending:
                continue
            complete = joining.sent is not None and joining.sent.is_complete
            if complete or joining.has_left():
                self._loop.close(joining.connection)
                del self._joining[name]
                self._membership.leave(name, joining.instance)
                self._on_change()
            elif joining.sent != peer_list or time.monotonic() - joining.sent_s > REPEAT_S:
                joining.send(self._loop, peer_list)

    def _enter(
        self, connection: ssl.SSLSocket, hello: Hello, source: str, *, reachable: bool
    ) -> None:
        host = Host(
            name=hello.name,
            address=source,
            port=hello.port,
            reachable=reachable,
            instance=hello.instance,
        )
        joining = _Joining(connection, hello.instance)
        if rejection := self._membership.rejection(hello):  # others may have come meanwhile
            later = self._membership.is_spare(hello)
            joining.send(self._loop, Welcome(rejected=rejection, later=later))
            return
        if hidden := self._membership.join(host):
            message = (
                f"neither of {hidden} and {hello.name} can be reached by the other; open a port on "
                "one of them (network.listen; see `thinpipe doctor`)"
            )
            joining.send(self._loop, Welcome(rejected=message))
            return
        if before := self._joining.pop(hello.name, None):
            self._loop.close(before.connection)
        self._joining[hello.name] = joining
        joining.send(self._loop, Welcome())
        self._on_change()


class _Joining:
    def __init__(self, connection: ssl.SSLSocket, instance: str) -> None:
        self.connection, self.instance = connection, instance
        self.sent: PeerList | None = None
        self.sent_s = time.monotonic()
        self.sending = False

    def send(self, loop: Loop, message: PeerList | Welcome) -> None:
        def over(_: object) -> None:
            self.sending, self.sent_s = False, time.monotonic()
            self.sent = message if isinstance(message, PeerList) else None
            if isinstance(message, Welcome) and message.rejected:
                loop.close(self.connection)

        self.sending = True
        loop.spawn(send(self.connection, message), LIMIT_S, done=over, failed=over)

    def has_left(self) -> bool:
        """Whether its connection is closed; it sends nothing."""
        try:
            return self.connection.recv(1) == b""
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
