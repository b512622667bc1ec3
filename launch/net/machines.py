"""Joining the machines of a run: over the overlay, or openly where its network is trusted."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from ipaddress import ip_address
from typing import Literal

from thinpipe.launch.config.network import NetworkConfig
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
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.membership import MOST_HOSTS
from thinpipe.launch.net.overlay.process import Overlay
from thinpipe.launch.net.overlay.settings import Settings
from thinpipe.launch.net.ranks.network import LOOPBACK, HostNetwork, limit_lookups, openly

Joins = Literal["now", "later"]
"""When a machine joins a run that is under way: at once, or when one of its machines is lost."""
_ANSWERS_S, _AGAIN_S = 10.0, 0.5
"""For how long one that joins looks whether there is a run."""
_LINK_STATES = {
    "silent": "connection to {} lost ({}); connecting again",
    "back": "connection to {} is back",
    "lost": "{} is given up: {}",
    "left": "{} has left the run",
}


def several_machines(
    config: NetworkConfig,
    endpoint: str,
    hosts: int,
    *,
    limit_s: float,
    log: Callable[[str], None],
    expected: Sequence[str] = (),
    joins: Joins | None = None,
) -> HostNetwork:
    """Join the hosts of a run; with an overlay, wait for all of them, `expected` by name if known.

    If it `joins` a run that is under way, nobody is waited for; "later": until a host is lost.

    Raises:
        ValueError: there is no key, a lost host would be waited for longer than `limit_s`, or the
            endpoint cannot be resolved or reached.
        OverlayError: not all hosts joined.
    """
    limit_lookups()
    host, port = parse_endpoint(endpoint)
    address = reachable_address(host)
    if joins:
        _find(address, port, endpoint, log)
    here = ip_address(address).is_loopback
    if here or config.trusted:
        own = LOOPBACK if here else _chosen_interface(address).address
        return openly(endpoint, own, (address, port), config.own_name(), holds=not joins)
    _check(config, hosts, limit_s)
    coordinates = is_own_address(address) and not joins
    listen = config.listens_at(_chosen_interface(address).address, port)
    if coordinates and listen is None:
        raise ValueError(
            f'network.listen = "none": {endpoint} (--rdzv) is this machine, which the others must '
            "reach; remove the setting here, or name another machine with --rdzv"
        )
    server = serve((LOOPBACK, 0)) if coordinates else None
    overlay = Overlay(
        Settings(
            name=config.own_name(),
            key_file=config.find_key(),
            needed=0 if joins else hosts,
            listen=listen and _resolved(listen, "network.listen"),
            coordinator=None if coordinates else (address, port),
            peers=_peers(config),
            patience_s=config.patience_s,
            store_port=server and server.getsockname()[1],
            waits=joins == "later",
        )
    )
    overlay.on_link = lambda peer, state, reason: log(_LINK_STATES[state].format(peer, reason))
    what = f"waiting for {hosts} machines at {endpoint}, at most {limit_s:.0f} s"
    log(f"joining the run at {endpoint}" if joins else what)
    with contextlib.ExitStack() as on_error:
        on_error.callback(overlay.close)
        overlay.join(limit_s, log, expected=expected)
        store = (LOOPBACK, int(overlay.client().ask("store_port")))
        on_error.pop_all()
    own, order = overlay.address(overlay.name), [overlay.peer_list.index(overlay.name)]
    return HostNetwork(endpoint, own, store, server, order, overlay.name, overlay)


def _find(address: str, port: int, endpoint: str, log: Callable[[str], None]) -> None:
    """Raises OverlayError: there is no run."""
    limit_s, waits = time.monotonic() + _ANSWERS_S, False
    while True:
        try:
            socket.create_connection((address, port), _ANSWERS_S).close()
            return
        except OSError as error:
            if time.monotonic() > limit_s:
                raise OverlayError(
                    f"--join: no run answers at {endpoint} ({error.strerror or error}): it has "
                    "ended, or has not begun"
                ) from None
            if not waits:
                log(f"no run answers at {endpoint} yet; trying for {_ANSWERS_S:.0f} s")
                waits = True
        time.sleep(_AGAIN_S)


def _check(config: NetworkConfig, hosts: int, limit_s: float) -> None:
    """Before anybody is waited for."""
    if hosts > MOST_HOSTS:
        raise ValueError(f"--nnodes = {hosts}: a run has at most {MOST_HOSTS} machines")
    if config.patience_s >= limit_s:
        raise ValueError(
            f"network.patience_s = {config.patience_s:g}: ranks wait for each other only "
            f"{limit_s:g} s (pipeline.peer_timeout_s); use a shorter patience, or raise the other"
        )
    keys.contexts(config.find_key())


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


def _peers(config: NetworkConfig) -> dict[str, tuple[str, int]]:
    return {
        name: _resolved(parse_endpoint(where), f"network.peers.{name}")
        for name, where in config.peers.items()
    }


def _resolved(where: tuple[str, int], setting: str) -> tuple[str, int]:
    """With an address for the name: the relay must not wait for a name server."""
    try:
        return resolve(where[0]), where[1]
    except ValueError as error:
        raise ValueError(f"{setting} = {format_endpoint(*where)}: {error}") from None
