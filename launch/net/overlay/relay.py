"""The process that carries everything between this host and the others of a run.

`python -m thinpipe.launch.net.overlay.relay`, started by `process.py`. It ends with its parent.
"""

import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinpipe.launch.host.interfaces import format_endpoint
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.control import OverlayError, Server
from thinpipe.launch.net.overlay.coordinator import Coordinator
from thinpipe.launch.net.overlay.forwards import Forwards
from thinpipe.launch.net.overlay.joining import Joiner, explain_key
from thinpipe.launch.net.overlay.links.dialer import Dialer
from thinpipe.launch.net.overlay.links.frames import FrameError, Kind, Traffic
from thinpipe.launch.net.overlay.links.handshake import LIMIT_S, Hello, Welcome, peer_name, send
from thinpipe.launch.net.overlay.links.link import Link
from thinpipe.launch.net.overlay.links.listener import Listener
from thinpipe.launch.net.overlay.links.loop import READ, Loop
from thinpipe.launch.net.overlay.membership import Host, Membership, PeerList
from thinpipe.launch.net.overlay.settings import Settings

_LEAVE_S = 2.0  # for the last bytes: a peer that takes none must not hold this host up
_MOST_TOLD = 10  # different rejections: strangers must not fill the launcher's terminal


class Relay:
    """Links to all other hosts, and the local ports that lead to them."""

    def __init__(self, settings: Settings) -> None:
        """Listen; ValueError if the key cannot be used, or the port is taken."""
        self._settings, self._loop = settings, Loop()
        accepting, self._context = keys.contexts(settings.key_file)
        keys.check_clock(self._context, settings.key_file, settings.name)
        self._instance = secrets.token_hex(8)
        self._peer_list: PeerList | None = None
        self._links: dict[str, Link] = {}
        self._dialers: list[Dialer] = []
        self._forwards = Forwards(self._loop, settings.name, settings.store_port)
        self._rejected: Counter[str] = Counter()
        self._told: set[str] = set()
        self._listener = self._listen(accepting)
        self._coordinator: Coordinator | None = None
        self._membership = Membership(settings.name, settings.needed)
        self._loop.ticks.append(self._tick)

    def run(self) -> None:
        parent = socket.socket(fileno=os.dup(0))  # readable once the launcher ends, however it does
        self._loop.watch(parent, READ, lambda _: self._leave(parent))
        Server(self._loop, self._handle).listen(self._settings.socket)
        if self._settings.coordinator is None:
            self._coordinator = Coordinator(
                self._loop,
                self._context,
                self._membership,
                lambda: self._take_peer_list(self._membership.peer_list),
            )
            own = Host(name=self._settings.name, address="", port=self._port, reachable=True,
                       instance=self._instance)  # fmt: skip
            self._membership.join(own)
            self._take_peer_list(self._membership.peer_list)
        else:
            self._join(self._settings.coordinator)
        try:
            self._loop.run()
        finally:
            shutil.rmtree(Path(self._settings.socket).parent, ignore_errors=True)

    def _tick(self, now_s: float) -> None:
        for link in self._links.values():
            link.tick(now_s, self._loop.late_s)
        for dialer in self._dialers:
            dialer.tick(now_s)
        self._forwards.tick(now_s)
        if self._coordinator is not None:
            self._coordinator.tick()

    def _leave(self, parent: socket.socket) -> None:
        """End once this host's last bytes are sent."""
        self._loop.close(parent)
        for link in self._links.values():
            link.say(Kind.BYE)  # so that its peer does not look for this host
        limit_s = time.monotonic() + _LEAVE_S

        def tick(now_s: float) -> None:
            if now_s > limit_s or all(link.is_idle for link in self._links.values()):
                self._loop.stop()

        self._loop.ticks.append(tick)

    @property
    def _port(self) -> int:
        return self._listener.port if self._listener is not None else 0

    def _join(self, coordinator: tuple[str, int]) -> None:
        hello = Hello(
            purpose="join",
            name=self._settings.name,
            instance=self._instance,
            hosts=self._settings.needed,
            port=self._port,
        )

        def joined(peer_list: PeerList, name: str) -> None:
            self._settings = self._settings.model_copy(update={"name": name})
            self._forwards.own = name
            self._take_peer_list(peer_list)

        Joiner(
            self._loop,
            self._context,
            coordinator,
            hello,
            joined=joined,
            report=_report,
            waits=self._settings.waits,
        ).start()

    def _take_peer_list(self, peer_list: PeerList) -> None:
        """The hosts are known, or one of them has been started again."""
        before = self._peer_list
        if not peer_list.is_complete or peer_list == before:
            _report("waiting", joined=peer_list.names)
            return
        self._peer_list = self._forwards.peer_list = peer_list
        for number, host in enumerate(peer_list.hosts):
            if host.name == self._settings.name:
                continue
            if host.name not in self._links:
                self._add_link(peer_list, number)
            elif before is not None and before.hosts[number].instance != host.instance:
                self._links[host.name].give_up("another relay has its name now")
                self._links[host.name].attempt = 0  # its relay counts from 1 again
        # once links are there: ranks ask for ports as soon as they hear of it
        _report("joined", peer_list=peer_list.model_dump(), name=self._settings.name)
        if self._coordinator is not None and before is not None:
            for link in self._links.values():
                link.say(Kind.PEER_LIST, peer_list.model_dump_json().encode())

    def _take_peer_list_from(self, peer: str, data: bytes) -> None:
        """The coordinator says where the hosts are now; nobody else may."""
        assert self._peer_list is not None
        try:
            peer_list = PeerList.model_validate_json(data)
        except ValueError:
            raise FrameError("malformed host list") from None
        if peer != self._peer_list.coordinator or not peer_list.is_of(self._peer_list):
            raise FrameError("host list from a peer that is not the coordinator")
        self._take_peer_list(peer_list)

    def _add_link(self, peer_list: PeerList, number: int) -> None:
        peer, own = peer_list.hosts[number].name, self._settings.name
        link = self._links[peer] = Link(
            self._loop,
            peer,
            first_stream=int(peer_list.index(own) > number),  # even at one end, odd at the other
            patience_s=self._settings.patience_s,
            exposed=self._forwards.exposed,
            on_peer_list=lambda data: self._take_peer_list_from(peer, data),
            on_change=lambda _, state, why: _report("link", peer=peer, state=state, reason=why),
        )
        dialer = Dialer(
            self._loop,
            self._context,
            link,
            address=lambda: self._address(peer),
            hello=lambda attempt: self._hello(link, attempt),
        )
        self._dialers.append(dialer)

    def _address(self, peer: str) -> tuple[str, int]:
        assert self._peer_list is not None
        if peer in self._settings.peers:
            return self._settings.peers[peer]
        if peer == self._peer_list.coordinator and self._settings.coordinator is not None:
            return self._settings.coordinator
        host = self._peer_list.host(peer)
        return host.address, host.port

    def _hello(self, link: Link, attempt: int) -> Hello | None:
        """The first message to a peer; None if it cannot be reached from here."""
        assert self._peer_list is not None
        own = self._settings.name
        if not self._peer_list.dials(own, link.peer):
            reachable = self._peer_list.host(link.peer).reachable
            return Hello(purpose="probe", name=own) if reachable else None
        return Hello(
            purpose="link",
            name=own,
            instance=self._instance,
            attempt=attempt,
            to=link.peer,
            run=self._peer_list.run,
            session=link.session.identity,
            fresh=link.session.is_fresh,
            received=link.session.received,
        )

    def _listen(self, context: ssl.SSLContext) -> Listener | None:
        if self._settings.listen is None:
            return None
        try:
            return Listener(
                self._loop,
                self._settings.listen,
                context,
                self._welcome,
                is_member=self._is_member,
                on_stranger=self._on_stranger,
            )
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise ValueError(
                f"network.listen = {format_endpoint(*self._settings.listen)}, on "
                f"{self._settings.name}: {reason}; was the run started twice here? "
                "Otherwise stop the program that uses the port, or name another one"
            ) from None

    def _is_member(self, address: str) -> bool:
        hosts = self._peer_list.hosts if self._peer_list is not None else ()
        named = (*self._settings.peers.values(), self._settings.coordinator)
        return address in [host.address for host in hosts] + [where[0] for where in named if where]

    def _welcome(self, connection: ssl.SSLSocket, hello: Hello, source: str) -> None:
        rejection = self._rejection(connection, hello)
        if rejection is not None:
            self._rejected[rejection.rejected] += 1
            # but for peers that look for the one before, as long as a newcomer is not let in
            if hello.purpose == "join" or self._coordinator is not None:
                self._tell_rejection(f"{hello.name} ({source}): {rejection.rejected}")
        if rejection is not None or hello.purpose == "probe":
            self._answer(connection, rejection or Welcome(), self._loop.close)
        elif hello.purpose == "join":
            assert self._coordinator is not None
            self._coordinator.admit(connection, hello, source)
        else:
            self._resume(connection, hello)

    def _on_stranger(self, source: str, error: Exception) -> None:
        if isinstance(error, ssl.SSLCertVerificationError):
            self._tell_rejection(f"{source}: {explain_key(error)}")

    def _tell_rejection(self, message: str) -> None:
        """The launcher shows each once while it waits; a running job is not disturbed."""
        waiting = self._peer_list is None and len(self._told) < _MOST_TOLD
        if waiting and message not in self._told:
            self._told.add(message)
            _report("rejected", message=message)

    def _resume(self, connection: ssl.SSLSocket, hello: Hello) -> None:
        link = self._links[hello.name]
        link.attempt = hello.attempt
        known = link.prepare(hello.session, fresh=hello.fresh)

        def use(connection: ssl.SSLSocket) -> None:
            if not known or link.connected or link.session.identity != hello.session:
                self._loop.close(connection)
            else:
                link.use(connection, hello.received)

        self._answer(connection, Welcome(known=known, received=link.session.received), use)

    def _rejection(self, connection: ssl.SSLSocket, hello: Hello) -> Welcome | None:
        proven, link = peer_name(connection), self._links.get(hello.name)
        if proven not in (None, hello.name):
            text = f"the key is that of {proven!r}, not of {hello.name!r}; correct network.name"
            return Welcome(rejected=text)
        if hello.purpose == "probe":
            return None
        if hello.purpose == "join" and self._coordinator is not None:
            connected, links = link is not None and link.connected, self._links.items()
            lost = [name for name, known in links if known.is_lost or known.has_left]
            if proven is not None and lost and link is None and not hello.hosts:
                return Welcome(
                    rejected=f"the key of this machine is for the name {proven} alone, which is "
                    f"none of the run's; use the run's key, or one for {lost[0]}, which is lost "
                    "(`thinpipe key add`, network.name)"
                )
            return self._coordinator.rejection(hello, connected=connected, lost=lost)
        if hello.purpose == "join":
            return Welcome(
                rejected=f"{self._settings.name} is not the machine of --rdzv; correct --rdzv"
            )
        peer_list = self._peer_list
        to = (peer_list.run, self._settings.name) if peer_list is not None else None
        if link is None or peer_list is None or (hello.run, hello.to) != to:
            return Welcome(rejected="another run")
        if peer_list.host(hello.name).instance != hello.instance:
            return Welcome(rejected="stale session: one of the two has not seen the last restart")
        if hello.attempt <= link.attempt:
            return Welcome(rejected="overtaken by a later connection")
        return None

    def _answer(
        self, connection: ssl.SSLSocket, welcome: Welcome, then: Callable[[ssl.SSLSocket], None]
    ) -> None:
        def failed(_: Exception) -> None:
            self._loop.close(connection)

        steps = send(connection, welcome)
        self._loop.spawn(steps, LIMIT_S, done=lambda _: then(connection), failed=failed)

    def _handle(self, what: str, given: dict[str, Any]) -> Any:
        link = self._links.__getitem__
        match what:
            case "own_number":
                return self._forwards.known().index(self._settings.name)
            case "store_port":
                return self._forwards.store_port(link)
            case "expose":
                return self._forwards.expose(int(given["port"]), int(given["pid"]))
            case "forward":
                traffic = Traffic[str(given["traffic"]).upper()]
                index, port, owner = (int(given[name]) for name in ("host", "port", "pid"))
                return self._forwards.forward(index, port, traffic, link, owner=owner)
            case "status":
                return self._status()
        raise OverlayError(f"no such request: {what!r}")

    def _status(self) -> dict[str, Any]:
        strangers = self._listener.rejected if self._listener is not None else Counter()
        return {
            "name": self._settings.name,
            "links": {name: _status_of(link) for name, link in self._links.items()},
            "rejected": {**strangers, **self._rejected},
        }


def _status_of(link: Link) -> dict[str, Any]:
    return asdict(link.stats) | {
        "connected": link.connected,
        "lost": link.is_lost,
        "left": link.has_left,
        "silence_s": link.silence_s,
        "resent": link.session.resent,
        "restarts": link.restarts,
    }


def _report(event: str, **fields: Any) -> None:
    os.set_blocking(1, event != "link")  # the launcher may be gone, or stopped
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def main() -> None:
    """Serve as `sys.argv[1]`, JSON, says."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends with its parent
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # streams and strangers take one each
    try:
        Relay(Settings.model_validate_json(sys.argv[1])).run()
    except ValueError as error:
        _report("failed", message=str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
