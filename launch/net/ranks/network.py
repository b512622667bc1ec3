"""How this host reaches the others: loopback, the overlay, or openly over a trusted network."""

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not re-exported

from thinpipe.launch.config.network import TAKEN, NetworkConfig, natural
from thinpipe.launch.host.device import local_rank
from thinpipe.launch.host.interfaces import format_endpoint, resolve, serve
from thinpipe.launch.host.scratch import use_scratch_folder
from thinpipe.launch.net.overlay.control import ADDRESS as OVERLAY
from thinpipe.launch.net.ranks.store import connect_store, hold_store

if TYPE_CHECKING:
    from thinpipe.launch.net.overlay.process import Overlay

LISTENS_AT = "THINPIPE_ADDRESS"
"""Environment variable: the address at which this host's ranks listen."""
ROUND = "THINPIPE_ROUND"
"""Environment variable: how often the hosts have met, 1 at the start. All hosts have the same."""
PLACED = "THINPIPE_PLACED"
"""Environment variable: the ranks of this host's processes, where the run says which they are."""
JOINS = "THINPIPE_JOINS"
"""Environment variable of a newcomer: what its replica calls itself in the run's store."""
HOLDS = "THINPIPE_HOLDS"
"""Environment variable: "0" on a host that does not hold the run's store."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostNetwork:
    """This host's place among those of a run.

    `store` is where they meet, for this host; `server` listens there on the host that holds it.
    `order` sorts hosts, `name` tells them apart; `address` is where this one's ranks listen.
    `host` is the name that its user gave it, and `placed` names the host of each rank, if hosts
    have chosen places.
    """

    endpoint: str
    address: str
    store: tuple[str, int]
    server: socket.socket | None
    order: list[Any]
    name: str
    overlay: "Overlay | None" = None
    host: str = ""
    placed: tuple[str, ...] = ()
    newcomer: str = ""
    """What this host calls itself in the store of a run that it joins under way."""

    @property
    def environment(self) -> dict[str, str]:
        found = {LISTENS_AT: self.address, HOLDS: str(int(self.server is not None))}
        if self.newcomer:
            found |= {JOINS: self.newcomer, TAKEN: self.host}
        if self.placed:
            own = [rank for rank, host in enumerate(self.placed) if host == self.host]
            found[PLACED] = ",".join(map(str, own))
        return found | ({OVERLAY: self.overlay.socket} if self.overlay is not None else {})

    @property
    def is_gone(self) -> bool:
        """Whether this host has lost its relay, and with it all others."""
        return self.overlay is not None and self.overlay.has_ended

    def open_store(self, wait_s: float) -> TCPStore:
        """The store, which this process holds from now on if it listens there."""
        if self.server is None:
            return connect_store(self.store, wait_s=wait_s)
        return hold_store(self.server, wait_s=wait_s)

    def lost_hosts(self) -> int:
        if self.overlay is None:
            return 0
        if not (links := self.overlay.links()):
            return len(self.overlay.peer_list.hosts) - 1
        return sum(link["lost"] for link in links.values())

    def close(self) -> None:
        if self.overlay is not None:
            self.overlay.close()


def one_machine() -> HostNetwork:
    """A run that does not leave this machine."""
    limit_lookups()
    return openly("", LOOPBACK, (LOOPBACK, 0))


def ranks_here() -> Sequence[int]:
    """The ranks on this host, which launchers number consecutively unless the run places them."""
    if PLACED in os.environ:
        return [int(rank) for rank in os.environ[PLACED].split(",")]
    first = int(os.environ["RANK"]) - local_rank()
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def first_here(rank: int, local_rank: int) -> int:
    """The first rank on this host, of which one is known; by it hosts are told apart."""
    return ranks_here()[0] if PLACED in os.environ else rank - local_rank


def join_as_rank(
    config: NetworkConfig, hosts: int, *, limit_s: float, log: Callable[[str], None]
) -> HostNetwork | None:
    """Join the machines as a rank that was started without our agent.

    None where there is nothing to do: the run stays on this machine or is meant to be open.

    Raises:
        ValueError: there is no key, or torchrun started the rank.
        OverlayError: not all hosts joined.
    """
    master, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if LISTENS_AT in os.environ or config.trusted or here == hosts or not (master and port):
        return None
    if ip_address(resolve(master)).is_loopback:
        return None
    if here > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError(
            "nothing that ranks of torchrun's send to other machines is protected; start the run "
            "with `thinpipe train --nnodes` on every machine, or, on a network where you trust "
            "everyone, set network.trusted = true"
        )
    from thinpipe.launch.net.machines import several_machines  # else not needed by a rank

    use_scratch_folder()  # as launchers do: its relay's socket must not outlive a failure
    endpoint = format_endpoint(master, int(port))
    network = several_machines(config, endpoint, hosts, limit_s=limit_s, log=log)
    os.environ.update(network.environment)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = network.store[0], str(network.store[1])
    return network


def limit_lookups() -> None:
    """glibc waits up to 20 s for each name, and torch looks up those of this host's addresses."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


def openly(
    endpoint: str, address: str, store: tuple[str, int], name: str = "", *, holds: bool = True
) -> HostNetwork:
    """Without an overlay: the first process at the store's address, if it is ours, holds it.

    Unless it `holds` none, as it joins a run that is under way.
    """
    server = None
    with contextlib.suppress(OSError):  # not ours, or another process was first
        if holds:
            server = serve(store)
            store = server.getsockname()[:2]
    order = [[list(part) for part in natural(name)], address]  # the same after JSON
    return HostNetwork(endpoint, address, store, server, order, secrets.token_hex(8))
