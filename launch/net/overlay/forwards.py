"""Local addresses that stand for ports of other hosts, and own ports that others may reach."""

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.links.frames import Traffic
from thinpipe.launch.net.overlay.links.link import Link
from thinpipe.launch.net.overlay.links.loop import Loop
from thinpipe.launch.net.overlay.membership import PeerList, loopback_address

LOOPBACK = "127.0.0.1"
_STORE = 0  # the port that stands for the store's on the coordinator's host
_SWEEP_S = 5.0  # a sweep looks at every owner; meanwhile its port only lingers


@dataclass
class _Forwarded:
    server: socket.socket
    owners: set[int]


class Forwards:
    """Ports that this host's processes and its peers may connect to.

    A peer reaches nothing but the ports that processes here have exposed. What a process asked for
    ends with it: ranks that are started again ask for other ports.
    """

    def __init__(self, loop: Loop, own: str, store_port: int | None) -> None:
        self.peer_list: PeerList | None = None
        self._loop, self.own, self._store_port = loop, own, store_port
        self._exposed: dict[int, set[int]] = {}
        self._forwarded: dict[tuple[int, int], _Forwarded] = {}
        self._swept_s = 0.0

    def tick(self, now_s: float) -> None:
        """Close, now and then, what processes that have ended had asked for."""
        if now_s < self._swept_s + _SWEEP_S:
            return
        self._swept_s = now_s
        for port, owners in list(self._exposed.items()):
            if not any(map(psutil.pid_exists, owners)):  # who was killed has taken nothing back
                del self._exposed[port]
        for key, forwarded in list(self._forwarded.items()):
            if not any(map(psutil.pid_exists, forwarded.owners)):
                self._loop.close(forwarded.server)
                del self._forwarded[key]

    def expose(self, port: int, owner: int) -> None:
        """Let peers connect to a port at this host's address, as long as that process lives."""
        self._exposed.setdefault(port, set()).add(owner)

    def exposed(self, port: int) -> tuple[str, int] | None:
        """Where a peer's connection to a port goes."""
        if port == _STORE and self._store_port is not None:
            return LOOPBACK, self._store_port
        if port not in self._exposed or self.peer_list is None:
            return None
        return loopback_address(self.peer_list.run, self.peer_list.index(self.own)), port

    def store_port(self, link: Callable[[str], Link]) -> int:
        if self._store_port is None:
            holder = link(self.known().coordinator)
            server = self._listen((LOOPBACK, 0), holder, _STORE, Traffic.CONTROL)
            self._store_port = int(server.getsockname()[1])
        return self._store_port

    def forward(
        self, index: int, port: int, traffic: Traffic, link: Callable[[str], Link], *, owner: int
    ) -> None:
        """Have a host's address lead to it, at a port, as long as that process lives.

        OverlayError if there is no such host, or the port is in use here.
        """
        peer_list = self.known()
        if not 0 <= index < len(peer_list.hosts):
            raise OverlayError(f"no host {index} in the run")
        name = peer_list.hosts[index].name
        if name == self.own:
            return
        if (index, port) in self._forwarded:
            self._forwarded[index, port].owners.add(owner)
            return
        address = loopback_address(peer_list.run, index), port
        try:
            server = self._listen(address, link(name), port, traffic)
        except OSError as error:
            raise OverlayError(
                f"{address[0]}:{port}, which stands for {name} here, cannot be used: "
                f"{error.strerror}; does a program on this machine listen at that port on all "
                "addresses?"
            ) from None
        self._forwarded[index, port] = _Forwarded(server, {owner})

    def _listen(
        self, address: tuple[str, int], link: Link, port: int, traffic: Traffic
    ) -> socket.socket:
        server = socket.create_server(address, backlog=128)

        def take(sock: socket.socket, _: object) -> None:
            with contextlib.suppress(OSError):  # its process is gone again
                link.open(sock, port, traffic)

        self._loop.listen(server, take)
        return server

    def known(self) -> PeerList:
        if self.peer_list is None:
            raise OverlayError("the hosts have not all joined")
        return self.peer_list
