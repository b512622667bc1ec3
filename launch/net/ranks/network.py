"""How this host reaches the others: loopback, the overlay, or openly over a trusted network."""

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

from thinpipe.launch.config.network import NOT_LISTENING, NetworkConfig
from thinpipe.launch.host.interfaces import (
    Interface,
    family_of,
    format_endpoint,
    interface_to,
    interfaces,
    is_own_address,
    parse_endpoint,
    reachable_address,
    resolve,
    serve,
)
from thinpipe.launch.net.overlay.control import ADDRESS as OVERLAY
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.membership import MOST_HOSTS, natural
from thinpipe.launch.net.overlay.process import Overlay
from thinpipe.launch.net.overlay.settings import Settings

LISTENS_AT = "THINPIPE_ADDRESS"
"""Environment variable: the address at which this host's ranks listen."""
ROUND = "THINPIPE_ROUND"
"""Environment variable: how often the hosts have met, 1 at the start. All hosts have the same."""
PLACED = "THINPIPE_PLACED"
"""Environment variable: the ranks of this host's processes, where the run says which they are."""
LOOPBACK = "127.0.0.1"
_LINK_STATES = {
    "silent": "connection to {} lost ({}); connecting again",
    "back": "connection to {} is back",
    "lost": "{} is given up: {}",
    "left": "{} has left the run",
}


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
    overlay: Overlay | None = None
    host: str = ""
    placed: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        found = {LISTENS_AT: self.address}
        if self.placed:
            own = [rank for rank, host in enumerate(self.placed) if host == self.host]
            found[PLACED] = ",".join(map(str, own))
        return found | ({OVERLAY: self.overlay.socket} if self.overlay is not None else {})

    @property
    def is_gone(self) -> bool:
        """Whether this host has lost its relay, and with it all others."""
        return self.overlay is not None and self.overlay.has_ended

    def lost_hosts(self) -> int:
        if self.overlay is None:
            return 0
        try:
            links = self.overlay.client().ask("status")["links"].values()
        except OverlayError:
            return len(self.overlay.peer_list.hosts) - 1
        return sum(link["lost"] for link in links)

    def close(self) -> None:
        if self.overlay is not None:
            self.overlay.close()


def one_machine() -> HostNetwork:
    """A run that does not leave this machine."""
    _limit_lookups()
    return _openly("", LOOPBACK, (LOOPBACK, 0))


def several_machines(
    config: NetworkConfig,
    endpoint: str,
    hosts: int,
    *,
    limit_s: float,
    log: Callable[[str], None],
    expected: Sequence[str] = (),
) -> HostNetwork:
    """Join the hosts of a run; with an overlay, wait for all of them, `expected` by name if known.

    Raises:
        ValueError: there is no key, a lost host would be waited for longer than `limit_s`, or the
            endpoint cannot be resolved or reached.
        OverlayError: not all hosts joined.
    """
    if hosts > MOST_HOSTS:
        raise ValueError(f"--nnodes = {hosts}: a run has at most {MOST_HOSTS} machines")
    _limit_lookups()
    host, port = parse_endpoint(endpoint)
    address = reachable_address(host)
    if ip_address(address).is_loopback:
        return _openly(endpoint, LOOPBACK, (address, port), config.own_name())
    if config.trusted:
        own = _chosen_interface(address).address
        return _openly(endpoint, own, (address, port), config.own_name())
    _check_patience(config.patience_s, limit_s)
    _check_key(config)
    coordinates = is_own_address(address)
    if coordinates and config.listen == NOT_LISTENING:
        raise ValueError(
            f'network.listen = "none": {endpoint} (--rdzv) is this machine, which the others must '
            "reach; remove the setting here, or name another machine with --rdzv"
        )
    listen = config.listens_at(_chosen_interface(address).address, port)
    server = serve((LOOPBACK, 0)) if coordinates else None
    overlay = Overlay(
        Settings(
            name=config.own_name(),
            key_file=config.find_key(),
            needed=hosts,
            listen=listen and _resolved(listen, "network.listen"),
            coordinator=None if coordinates else (address, port),
            peers={
                name: _resolved(parse_endpoint(where), f"network.peers.{name}")
                for name, where in config.peers.items()
            },
            patience_s=config.patience_s,
            store_port=server.getsockname()[1] if server is not None else None,
        )
    )
    overlay.on_link = lambda peer, state, reason: log(_LINK_STATES[state].format(peer, reason))
    log(f"waiting for {hosts} machines at {endpoint}, at most {limit_s:.0f} s")
    try:
        overlay.join(limit_s, log, expected=expected)
        store = (LOOPBACK, int(overlay.client().ask("store_port")))
    except BaseException:
        overlay.close()
        raise
    own, order = overlay.address(overlay.name), [overlay.peer_list.index(overlay.name)]
    return HostNetwork(endpoint, own, store, server, [*order], overlay.name, overlay)


def _check_key(config: NetworkConfig) -> None:
    """Before anybody is waited for."""
    from thinpipe.launch.net.overlay.keys import contexts  # ranks need none

    contexts(config.find_key())


def _check_patience(patience_s: float, limit_s: float) -> None:
    if patience_s >= limit_s:
        raise ValueError(
            f"network.patience_s = {patience_s:g}: ranks wait for each other only "
            f"{limit_s:g} s (pipeline.peer_timeout_s); use a shorter patience, or raise the other"
        )


def join_as_rank(
    config: NetworkConfig, hosts: int, *, limit_s: float, log: Callable[[str], None]
) -> HostNetwork | None:
    """What an agent of ours does for its ranks, for a rank that was started without one.

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
    endpoint = format_endpoint(master, int(port))
    network = several_machines(config, endpoint, hosts, limit_s=limit_s, log=log)
    os.environ.update(network.environment)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = network.store[0], str(network.store[1])
    return network


def _chosen_interface(other: str) -> Interface:
    """The one that GLOO_SOCKET_IFNAME names, if another host can reach it."""
    wanted, all_here = os.environ.get("GLOO_SOCKET_IFNAME", ""), interfaces()
    named = all_here.get(wanted)
    if named is None and wanted:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME = {wanted}: no interface of this machine with an address; it has "
            f"{', '.join(all_here)}: use one of them, or unset GLOO_SOCKET_IFNAME"
        )
    if named is None or named.is_loopback:
        return interface_to(other)
    same = [own for own in named.addresses if family_of(own) == family_of(other)]
    return replace(named, address=same[0]) if same else interface_to(other)


def _limit_lookups() -> None:
    """glibc waits up to 20 s for each name, and torch looks up those of this host's addresses."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


def _resolved(where: tuple[str, int], setting: str) -> tuple[str, int]:
    """With an address for the name: the relay must not wait for a name server."""
    try:
        return resolve(where[0]), where[1]
    except ValueError as error:
        raise ValueError(f"{setting} = {format_endpoint(*where)}: {error}") from None


def _openly(endpoint: str, address: str, store: tuple[str, int], name: str = "") -> HostNetwork:
    """Without an overlay; the first process at the store's address, if it is ours, holds it."""
    server = None
    with contextlib.suppress(OSError):  # not ours, or another process was first
        server = serve(store)
        store = server.getsockname()[:2]
    order = [[list(part) for part in natural(name)], address]  # the same after JSON
    return HostNetwork(endpoint, address, store, server, order, secrets.token_hex(8))
