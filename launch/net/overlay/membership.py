"""Which hosts a run has: they join at the coordinator, which numbers them by name."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address

from pydantic import BaseModel

from thinpipe.launch.config.network import natural
from thinpipe.launch.net.overlay.links.handshake import Hello, Name

MOST_HOSTS = 4095
"""Loopback addresses of a run, one per host."""
OWN_NAMES = "give each a name of its own: network.name"
_FIRST_ADDRESS = IPv4Address("127.64.0.0")


class Host(BaseModel, frozen=True, extra="forbid", strict=True):
    """A host of the run; `address` is where the coordinator saw it, and the others reach it."""

    name: Name
    address: str
    port: int
    reachable: bool
    instance: str


class PeerList(BaseModel, frozen=True, extra="forbid", strict=True):
    """All hosts in the order of their names; those that a run still waits for are not in it."""

    run: str
    coordinator: str
    needed: int
    hosts: tuple[Host, ...] = ()

    @property
    def is_complete(self) -> bool:
        return len(self.hosts) == self.needed

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.hosts]

    def index(self, name: str) -> int:
        return self.names.index(name)

    def host(self, name: str) -> Host:
        return self.hosts[self.index(name)]

    def is_of(self, other: "PeerList") -> bool:
        same = ("run", "coordinator", "needed", "names")
        return all(getattr(self, name) == getattr(other, name) for name in same)

    def dials(self, one: str, other: str) -> bool:
        """Whether `one` makes the connections between two hosts: only one need be reachable."""
        first, second = sorted((one, other), key=self.index)
        if self.coordinator in (one, other):
            return other == self.coordinator
        return one == (second if self.host(first).reachable else first)


def loopback_address(run: str, index: int) -> str:
    """The address of a host, on the loopback of every host; runs that share a machine differ.

    From 127.64.0.0 on: 10 bits for the run, 12 for the host.
    """
    return str(_FIRST_ADDRESS + (int(run[:3], 16) % 1024 << 12) + index + 1)


@dataclass
class Membership:
    """The coordinator's part."""

    name: str
    needed: int

    def __post_init__(self) -> None:
        self.run = secrets.token_hex(8)
        self._hosts: dict[str, Host] = {}

    @property
    def peer_list(self) -> PeerList:
        hosts = tuple(sorted(self._hosts.values(), key=lambda host: natural(host.name)))
        return PeerList(run=self.run, coordinator=self.name, needed=self.needed, hosts=hosts)

    def rejection(self, hello: Hello) -> str:
        """Why a host cannot join; nothing if it can."""
        known = self._hosts.get(hello.name)
        names = ", ".join(self.peer_list.names)
        if not hello.hosts and not self.peer_list.is_complete:
            return "the run has not begun: start a machine of it with --nnodes; a spare may wait"
        if not hello.hosts and known is None:
            return (
                f"none of the run's machines ({names}) is lost, so {hello.name} cannot take the "
                "place of one; try again when one is: a silent one is after network.patience_s"
            )
        if hello.hosts not in (0, self.needed):
            return (
                f"this run has --nnodes = {self.needed}, and {hello.name} was started with "
                f"{hello.hosts}; start all machines with the same"
            )
        if known is None and len(self._hosts) == self.needed:
            return f"the run has its {self.needed} machines already ({names})"
        if hello.name == self.name:
            return f"another machine is named {hello.name!r}; {OWN_NAMES}"
        return ""

    def is_spare(self, hello: Hello) -> bool:
        return not hello.hosts and hello.name not in self._hosts

    def place(self, hello: Hello, lost: Collection[str]) -> str | None:
        """The name of a lost host, which a spare may take."""
        may_take = self.is_spare(hello) and self.peer_list.is_complete
        return min(lost, key=natural, default=None) if may_take else None

    def join(self, host: Host) -> str | None:
        """Enter a host, in the place of the one that had its name.

        Returns the name of a host, if neither can reach the other: then it is not entered.
        """
        hidden = [h.name for h in self._hosts.values() if not (h.reachable or h.name == host.name)]
        if hidden and not host.reachable:
            return hidden[0]
        self._hosts[host.name] = host
        return None

    def leave(self, name: str, instance: str) -> None:
        """A host that joined has gone before the run started."""
        known = self._hosts.get(name)
        if known is not None and known.instance == instance and not self.peer_list.is_complete:
            del self._hosts[name]
