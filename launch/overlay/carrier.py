"""The process that carries everything between this host and the others of a run.

`python -m thinpipe.launch.overlay.carrier`, started by `process.py`. It ends with its parent.
"""

import contextlib
import errno
import json
import os
import secrets
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from thinpipe.launch.overlay import keys
from thinpipe.launch.overlay.control import OverlayError, Server
from thinpipe.launch.overlay.frames import FrameError, Traffic
from thinpipe.launch.overlay.handshake import (
    LIMIT_S,
    Hello,
    Refused,
    Welcome,
    accept,
    connect,
    receive,
    send,
)
from thinpipe.launch.overlay.link import Link
from thinpipe.launch.overlay.loop import READ, Loop, Steps
from thinpipe.launch.overlay.membership import Host, Membership, Roster, loopback_address

_MOST_STRANGERS, _MOST_OF_ONE = 64, 32
"""Connections that may be unproven at a time, in all and from one address."""
_ACCEPTS = 16
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_PROBE_S = 3.0
_LEAVE_S = 2.0
_LOOPBACK = "127.0.0.1"
_STORE = 0
"""The port that stands for the store's on the coordinator's host."""


class Settings(BaseModel):
    """What the launcher tells its carrier; `coordinator` is None on the coordinator's host, where
    the hosts meet at local port `store_port`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    key_file: Path
    needed: int
    listen: tuple[str, int] | None
    coordinator: tuple[str, int] | None
    peers: Mapping[str, tuple[str, int]] = {}
    patience_s: float
    store_port: int | None = None
    socket: str = ""


class Carrier:
    """Links to all other hosts, and the local ports that lead to them."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._loop = settings, Loop()
        self._server_context, self._client_context = keys.contexts(settings.key_file)
        self._incarnation = secrets.token_hex(8)
        self._links: dict[str, Link] = {}
        self._roster: Roster | None = None
        self._exposed: set[int] = set()
        self._forwarded: dict[tuple[int, int], socket.socket] = {}
        self._store_server: socket.socket | None = None
        self._strangers: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._dialing: set[str] = set()
        self._next_dial: dict[str, tuple[float, float]] = {}
        """When to try again, and the pause after that."""
        self._joiners: dict[str, _Joiner] = {}
        self._membership: Membership | None = None
        self._port = 0
        self._loop.ticks.append(self._tick)

    def run(self) -> None:
        """Serve until the parent ends."""
        settings = self._settings
        os.set_blocking(0, False)
        parent = socket.socket(fileno=os.dup(0))
        self._loop.watch(parent, READ, lambda _: self._leave(parent))
        Server(self._loop, self._handle).listen(settings.socket)
        if settings.listen is not None:
            self._listen(settings.listen)
        if settings.coordinator is None:
            self._membership = Membership(settings.name, settings.needed)
            self._membership.join(self._self("", reachable=True))
            self._take_roster(self._membership.roster)
        else:
            self._join()
        self._loop.run()

    def _leave(self, parent: socket.socket) -> None:
        """The parent has ended: what its processes sent still goes out."""
        self._loop.close(parent)
        limit_s = time.monotonic() + _LEAVE_S

        def tick(now_s: float) -> None:
            if now_s > limit_s or all(link.is_idle for link in self._links.values()):
                self._loop.stop()

        self._loop.ticks.append(tick)

    # The run's hosts -----------------------------------------------------------------------------

    def _self(self, address: str, *, reachable: bool) -> Host:
        return Host(
            name=self._settings.name,
            address=address,
            port=self._port,
            reachable=reachable,
            incarnation=self._incarnation,
        )

    def _join(self) -> None:
        assert self._settings.coordinator is not None
        hello = Hello(
            purpose="join",
            name=self._settings.name,
            incarnation=self._incarnation,
            hosts=self._settings.needed,
            port=self._port,
        )

        def steps() -> Steps[Roster]:
            connection, _ = yield from connect(coordinator, self._client_context, lambda: hello)
            try:
                welcome = yield from receive(connection, Welcome)
                if welcome.refused:
                    raise Refused(welcome.refused)
                while True:
                    roster = yield from receive(connection, Roster)
                    if roster.is_complete:
                        return roster
                    _tell("waiting", joined=[host.name for host in roster.hosts])
            finally:
                self._loop.close(connection)

        def failed(error: Exception) -> None:
            if isinstance(error, Refused):
                _tell("failed", message=str(error))
                return
            _tell("unreachable", message=_explain(error))
            self._loop.after(0.5, self._join)

        coordinator = self._settings.coordinator
        self._loop.spawn(steps(), 1e9, done=self._take_roster, failed=failed)

    def _take_roster(self, roster: Roster) -> None:
        """The hosts are known, or one of them is another incarnation than before."""
        before, own = self._roster, self._settings.name
        _tell("waiting", joined=[host.name for host in roster.hosts])
        if not roster.is_complete or roster == before:
            return
        self._roster = roster
        index = roster.index(own)
        for number, host in enumerate(roster.hosts):
            if host.name == own:
                continue
            if host.name not in self._links:
                self._links[host.name] = self._link(host.name, first_stream=int(index > number))
            elif before is not None and before.hosts[number].incarnation != host.incarnation:
                self._links[host.name].give_up("was started again")
        _tell("joined", name=own, roster=roster.model_dump())
        if self._membership is not None and before is not None:
            for link in self._links.values():
                link.send_roster(roster.model_dump_json().encode())

    def _link(self, peer: str, *, first_stream: int) -> Link:
        return Link(
            self._loop,
            peer,
            first_stream=first_stream,
            patience_s=self._settings.patience_s,
            exposed=self._exposed_address,
            on_roster=lambda data: self._take_roster(Roster.model_validate_json(data)),
            on_change=lambda link, state, reason: _tell(
                "link", peer=link.peer, state=state, reason=reason
            ),
        )

    # Connections from others ---------------------------------------------------------------------

    def _listen(self, address: tuple[str, int]) -> None:
        server = socket.create_server(address, backlog=256)
        server.setblocking(False)
        self._port = server.getsockname()[1]
        self._loop.watch(server, READ, lambda _: self._accept(server))

    def _accept(self, server: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, (source, _) = server.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(0.01)  # it would be readable again at once
                return
            if (
                self._strangers.total() >= _MOST_STRANGERS
                or self._strangers[source] >= _MOST_OF_ONE
            ):
                self._refused["too many at once"] += 1
                sock.close()
                continue
            self._strangers[source] += 1
            self._prove(sock, source)

    def _prove(self, sock: socket.socket, source: str) -> None:
        def done(found: tuple[ssl.SSLSocket, Hello]) -> None:
            self._strangers[source] -= 1
            self._welcome(*found, source)

        def failed(error: Exception) -> None:
            self._strangers[source] -= 1
            self._refused[type(error).__name__] += 1

        self._loop.spawn(accept(sock, self._server_context), LIMIT_S, done=done, failed=failed)

    def _welcome(self, connection: ssl.SSLSocket, hello: Hello, source: str) -> None:
        refusal = self._refusal(connection, hello)
        if refusal or hello.purpose == "probe":
            self._refused["another run or name"] += bool(refusal)
            self._answer(connection, Welcome(refused=refusal), then=self._loop.close)
        elif hello.purpose == "join":
            self._admit(connection, hello, source)
        else:
            link = self._links[hello.name]
            known = link.prepare(hello.session, fresh=hello.fresh)
            welcome = Welcome(known=known, received=link.session.received)

            def use(connection: ssl.SSLSocket) -> None:
                if known and link.session.identity == hello.session and not link.connected:
                    self._use(link, connection, hello.received)
                else:
                    self._loop.close(connection)

            self._answer(connection, welcome, then=use)

    def _refusal(self, connection: ssl.SSLSocket, hello: Hello) -> str:
        proven = keys.peer_name(connection)
        if proven not in (None, hello.name):
            return f"the key is {proven!r}'s, not {hello.name!r}'s; correct network.name"
        if hello.purpose == "probe":
            return ""
        if hello.purpose == "join":
            if self._membership is None:
                return f"{self._settings.name} is not the machine at --rdzv; correct --rdzv"
            joiner, link = self._joiners.get(hello.name), self._links.get(hello.name)
            present = (joiner is not None and not joiner.is_closed()) or (
                link is not None and link.connected
            )
            if present:
                return (
                    f"another machine is named {hello.name!r}, or this one was started twice; give "
                    "each a name of its own: network.name"
                )
            return self._membership.refusal(hello)
        run = self._roster.run if self._roster is not None else ""
        if hello.run != run or hello.to != self._settings.name or hello.name not in self._links:
            return "another run"
        return ""

    def _answer(self, connection: ssl.SSLSocket, welcome: Welcome, *, then: Any) -> None:
        self._loop.spawn(
            send(connection, welcome),
            LIMIT_S,
            done=lambda _: then(connection),
            failed=lambda _: self._loop.close(connection),
        )

    def _admit(self, connection: ssl.SSLSocket, hello: Hello, source: str) -> None:
        """A host joins: see whether it can be reached, then enter it."""
        assert self._membership is not None
        membership = self._membership

        def enter(reachable: bool) -> None:
            host = Host(
                name=hello.name,
                address=source,
                port=hello.port,
                reachable=reachable,
                incarnation=hello.incarnation,
            )
            membership.join(host)
            hidden = membership.unconnectable()
            if hidden is not None:
                message = (
                    f"neither of {hidden[0]} and {hidden[1]} can be reached by the other; open a "
                    "port on one of them (network.listen; see `thinpipe doctor`)"
                )
                membership.leave(hello.name, hello.incarnation)
                self._answer(connection, Welcome(refused=message), then=self._loop.close)
                return
            self._joiners[hello.name] = _Joiner(connection, hello.incarnation)
            self._take_roster(membership.roster)

        def welcomed(_: ssl.SSLSocket) -> None:
            if not hello.port:
                enter(False)
                return
            probe = Hello(purpose="probe", name=self._settings.name)
            steps = connect((source, hello.port), self._client_context, lambda: probe)

            def reached(found: tuple[ssl.SSLSocket, Hello]) -> None:
                self._loop.close(found[0])
                enter(True)

            self._loop.spawn(steps, _PROBE_S, done=reached, failed=lambda _: enter(False))

        self._answer(connection, Welcome(), then=welcomed)

    # Connections to others -----------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        for link in self._links.values():
            link.tick(now_s, self._loop.late_s)
            if not link.connected and link.peer not in self._dialing:
                self._dial(link, now_s)
        for name, joiner in list(self._joiners.items()):
            self._serve(name, joiner)

    def _dial(self, link: Link, now_s: float) -> None:
        assert self._roster is not None
        roster, own = self._roster, self._settings.name
        due_s, pause_s = self._next_dial.get(link.peer, (0.0, _FIRST_PAUSE_S))
        if not roster.dials(own, link.peer) or now_s < due_s:
            return
        host = roster.hosts[roster.index(link.peer)]
        address = self._settings.peers.get(link.peer, (host.address, host.port))
        if link.peer == roster.coordinator and self._settings.coordinator is not None:
            address = self._settings.coordinator

        def hello() -> Hello:
            return Hello(
                purpose="link",
                name=own,
                to=link.peer,
                run=roster.run,
                session=link.session.identity,
                fresh=link.session.is_fresh,
                received=link.session.received,
            )

        def steps() -> Steps[tuple[ssl.SSLSocket, Hello, Welcome]]:
            connection, said = yield from connect(address, self._client_context, hello)
            try:
                if keys.peer_name(connection) not in (None, link.peer):
                    raise ValueError(f"{address[0]} is not {link.peer}")
                return connection, said, (yield from receive(connection, Welcome))
            except BaseException:
                self._loop.close(connection)
                raise

        def done(found: tuple[ssl.SSLSocket, Hello, Welcome]) -> None:
            connection, said, welcome = found
            self._dialing.discard(link.peer)
            self._next_dial.pop(link.peer, None)
            if welcome.refused or not welcome.known or said.session != link.session.identity:
                self._loop.close(connection)
                if not welcome.refused:
                    link.restart()
                self._next_dial[link.peer] = (now_s + _LONGEST_PAUSE_S, _LONGEST_PAUSE_S)
            else:
                self._use(link, connection, welcome.received)

        def failed(error: Exception) -> None:
            self._dialing.discard(link.peer)
            self._next_dial[link.peer] = (
                time.monotonic() + pause_s,
                min(_LONGEST_PAUSE_S, 2 * pause_s),
            )

        self._dialing.add(link.peer)
        self._loop.spawn(steps(), LIMIT_S, done=done, failed=failed)

    def _use(self, link: Link, connection: ssl.SSLSocket, received: int) -> None:
        try:
            link.use(connection, received)
        except FrameError as error:
            self._loop.close(connection)
            link.give_up(f"sent {error}")

    def _serve(self, name: str, joiner: "_Joiner") -> None:
        """Tell a host that waits who else has joined; it leaves when it knows all."""
        assert self._membership is not None
        roster = self._membership.roster
        if joiner.sending:
            return
        if (joiner.sent is not None and joiner.sent.is_complete) or joiner.is_closed():
            self._membership.leave(name, joiner.incarnation)
            self._loop.close(joiner.connection)
            del self._joiners[name]
        elif joiner.sent != roster:
            joiner.sending = True

            def sent(_: object) -> None:
                joiner.sending, joiner.sent = False, roster

            self._loop.spawn(send(joiner.connection, roster), LIMIT_S, done=sent, failed=sent)

    # Requests of processes on this host ----------------------------------------------------------

    def _handle(self, what: str, arguments: dict[str, Any]) -> Any:
        if what == "own_number":
            return self._roster.index(self._settings.name) if self._roster is not None else None
        if what == "store_port":
            return self._store_port()
        if what == "expose":
            self._exposed.add(int(arguments["port"]))
            return None
        if what == "forward":
            traffic = Traffic[str(arguments["traffic"]).upper()]
            return self._forward(int(arguments["host"]), int(arguments["port"]), traffic)
        if what == "status":
            return {
                "links": {
                    name: {
                        **asdict(link.stats),
                        "connected": link.connected,
                        "lost": link.is_lost,
                        "streams": len(link.streams),
                        "resent": link.session.resent,
                    }
                    for name, link in self._links.items()
                },
                "refused": dict(self._refused),
            }
        raise OverlayError(f"no such request: {what!r}")

    def _exposed_address(self, port: int) -> tuple[str, int] | None:
        if port == _STORE and self._settings.store_port is not None:
            return _LOOPBACK, self._settings.store_port
        if port not in self._exposed or self._roster is None:
            return None
        return loopback_address(self._roster.run, self._roster.index(self._settings.name)), port

    def _store_port(self) -> int:
        """The local port at which this host's processes find the store."""
        if self._settings.store_port is not None:
            return self._settings.store_port
        if self._roster is None:
            raise OverlayError("the hosts have not all joined")
        if self._store_server is None:
            holder = self._roster.coordinator
            self._store_server = self._forward_to(holder, _STORE, (_LOOPBACK, 0), Traffic.CONTROL)
        return int(self._store_server.getsockname()[1])

    def _forward(self, index: int, port: int, traffic: Traffic) -> None:
        if self._roster is None or not 0 <= index < len(self._roster.hosts):
            raise OverlayError(f"no host {index} in the run")
        name = self._roster.hosts[index].name
        if name == self._settings.name or (index, port) in self._forwarded:
            return
        address = loopback_address(self._roster.run, index), port
        try:
            self._forwarded[index, port] = self._forward_to(name, port, address, traffic)
        except OSError as error:
            raise OverlayError(
                f"{address[0]}:{port}, which stands for {name} here, cannot be used: "
                f"{error.strerror}; does a program on this machine listen at that port on all "
                "addresses?"
            ) from None

    def _forward_to(
        self, name: str, port: int, address: tuple[str, int], traffic: Traffic
    ) -> socket.socket:
        """Listen at a local address that stands for a port of another host's."""
        server = socket.create_server(address, backlog=128)
        server.setblocking(False)

        def on_event(_: int) -> None:
            with contextlib.suppress(OSError):
                self._links[name].open(server.accept()[0], port, traffic)

        self._loop.watch(server, READ, on_event)
        return server


class _Joiner:
    """A host that waits for the others."""

    def __init__(self, connection: ssl.SSLSocket, incarnation: str) -> None:
        self.connection, self.incarnation = connection, incarnation
        self.sent: Roster | None = None
        self.sending = False

    def is_closed(self) -> bool:
        """Whether it has gone; it sends nothing."""
        try:
            self.connection.recv(1)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
        return True


def _explain(error: Exception) -> str:
    """A failure to connect, in words."""
    if isinstance(error, ssl.SSLCertVerificationError) or "CERT" in str(error).upper():
        return "it has the key of another run; copy one key file to all machines"
    if isinstance(error, ssl.SSLError):
        return f"it does not speak TLS 1.3 ({error.reason}); is another program using that port?"
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)


def _tell(event: str, **fields: Any) -> None:
    """A line for the launcher."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def main() -> None:
    """Serve as `sys.argv[1]`, JSON, says."""
    try:
        Carrier(Settings.model_validate_json(sys.argv[1])).run()
    except (ValueError, OSError) as error:
        _tell("failed", message=str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
