"""A host's way into a run: it asks the coordinator, and waits there until all have come."""

import ssl
import time
from collections.abc import Callable
from typing import Any

from thinpipe.launch.host.interfaces import format_endpoint
from thinpipe.launch.net.overlay.links.handshake import (
    Hello,
    Rejected,
    Welcome,
    connect,
    peer_name,
    receive,
)
from thinpipe.launch.net.overlay.links.loop import Loop, Steps
from thinpipe.launch.net.overlay.links.tcp import Segments
from thinpipe.launch.net.overlay.membership import PeerList

REPEAT_S = 2.0
"""How often the coordinator says who has come, news or not."""
_AGAIN_S = 0.5  # the coordinator may be started after the others
_WELCOME_S = 10.0
"""The coordinator looks whether it can reach a host before it answers."""
_STALE_S = 8.0
"""How long a name may look taken because its old connection has not been missed yet."""

_NOT_NOW = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
_WRONG_CLOCK = (
    "a key is not valid yet, or has expired, by the clock of one of the two machines; correct the "
    "clocks (timedatectl set-ntp true) or make a new key (thinpipe key new)"
)
_OTHER_KEY = "its key is another run's; copy one key file to all machines"

Report = Callable[..., None]


class Joiner:
    """Tries until it is in, or is rejected; `joined` is called with the hosts of the run."""

    def __init__(
        self,
        loop: Loop,
        context: ssl.SSLContext,
        coordinator: tuple[str, int],
        hello: Hello,
        *,
        joined: Callable[[PeerList, str], None],
        report: Report,
        waits: bool = False,
    ) -> None:
        """`joined` is told the name, too: a lost host's, if this one takes its place.

        It `waits` until one is lost, if none is.
        """
        self._loop, self._context, self._coordinator = loop, context, coordinator
        self._hello, self._joined, self._report = hello, joined, report
        self._own_name, self._waits = hello.name, waits
        self._rejected_s: float | None = None
        self._segments = Segments()

    def start(self) -> None:
        self._spawn(self._enter(), done=self._wait)

    def _wait(self, connection: ssl.SSLSocket) -> None:
        """Take the next list of hosts; the coordinator sends one every few seconds."""

        def done(peer_list: PeerList) -> None:
            self._report("waiting", joined=[host.name for host in peer_list.hosts])
            if not peer_list.is_complete:
                self._wait(connection)
                return
            self._loop.close(connection)
            self._joined(peer_list, self._hello.name)

        self._spawn(self._next(connection), done=done)

    def _enter(self) -> Steps[ssl.SSLSocket]:
        connection, _ = yield from connect(
            self._coordinator, self._context, lambda: self._hello, self._segments
        )
        try:
            welcome = yield from receive(connection, Welcome)
            if welcome.rejected:
                raise Rejected(welcome)
        except BaseException:
            self._loop.close(connection)
            raise
        return connection

    def _next(self, connection: ssl.SSLSocket) -> Steps[PeerList]:
        try:
            peer_list = yield from receive(connection, PeerList)
            names = [host.name for host in peer_list.hosts]
            if peer_name(connection) not in (None, peer_list.coordinator) or (
                peer_list.is_complete and self._hello.name not in names
            ):
                raise ValueError("it is not the machine where this run meets")
        except BaseException:
            self._loop.close(connection)
            raise
        return peer_list

    def _spawn(self, steps: Steps[Any], *, done: Callable[[Any], None]) -> None:
        self._loop.spawn(steps, _WELCOME_S, done=done, failed=self._failed)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, Rejected):
            own, place = self._hello.name == self._own_name, error.welcome.place
            # another one may have been faster; then there may be another place
            name = place if own and place is not None else self._own_name
            self._hello = self._hello.model_copy(update={"name": name})
            if own and place is not None:
                self.start()
                return
            now_s = time.monotonic()
            self._rejected_s = self._rejected_s or now_s
            if error.welcome.later and self._waits:
                self._rejected_s = None
                self._report("spare", message=str(error))
            elif not error.welcome.again or now_s - self._rejected_s > _STALE_S:
                self._report("failed", message=str(error))
                return
        else:
            if isinstance(error, TimeoutError):
                self._segments.stalled()
            where = f"{format_endpoint(*self._coordinator)} cannot be reached"
            self._report("unreachable", message=f"{where}: {_explain(error)}")
        self._loop.after(_AGAIN_S, self.start)


def explain_key(error: ssl.SSLCertVerificationError) -> str:
    """Why the key of another machine is not accepted here."""
    return _WRONG_CLOCK if error.verify_code in _NOT_NOW else _OTHER_KEY


def _explain(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and "ALERT" in str(error):
        clock = any(word in str(error) for word in ("EXPIRED", "BAD_CERTIFICATE"))
        return f"it rejects this machine's key: {_WRONG_CLOCK if clock else _OTHER_KEY}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return explain_key(error)
    if isinstance(error, ssl.SSLError):
        return f"it does not speak TLS 1.3 ({error.reason}); does another program use that port?"
    return str((isinstance(error, OSError) and error.strerror) or error)
