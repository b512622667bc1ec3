"""Measures every link, one after the other: connectivity, round trip, rate, clock offset."""

import socket
import struct
import time
from dataclasses import asdict, dataclass

from thinpipe.launch.distributed.network import HostNetwork
from thinpipe.launch.doctor.group import HostGroup
from thinpipe.launch.doctor.host import HostInfo
from thinpipe.launch.host.links import links
from thinpipe.launch.host.tcp_probe import answer_pings, flood, payload_bps, ping
from thinpipe.launch.overlay.process import Overlay

_CONNECT_S = 3.0
_POLL_S = 0.05
_IP_MTU = 14  # not in the socket module
_DOUBLE = struct.Struct("!d")
_WARM_UP_TRIPS = 10  # slow start doubles the rate once a round trip


@dataclass(frozen=True)
class LinkInfo:
    """The link from one host to another, by index. `rate_bps` is payload; `clock_offset_s` is how
    far the target's clock is ahead; `closed` is the reason of a failed connection, then the rest
    is 0.
    """

    source: int
    target: int
    closed: str | None = None
    round_trip_s: float = 0.0
    rate_bps: float = 0.0
    clock_offset_s: float = 0.0
    path_mtu: int = 0
    bbr: bool = False


def listen(network: HostNetwork) -> socket.socket:
    """Listen on a port that the system chooses, as gloo does, and let the other hosts reach it."""
    server = socket.create_server((network.address, 0), backlog=64)
    if network.overlay is not None:
        network.overlay.client().ask("expose", port=server.getsockname()[1])
    return server


def measure_links(
    group: HostGroup,
    hosts: list[HostInfo],
    server: socket.socket,
    network: HostNetwork,
    *,
    window_s: float,
) -> list[LinkInfo]:
    """Measure all ordered pairs; a collective with the same result on every host.

    Raises:
        DoctorError: a host was lost.
    """
    server.settimeout(group.wait_s)
    found = []
    for source, target in links(group.hosts):
        key = f"link/{source}/{target}"
        if group.index == source:
            link = _send(group, hosts[target], LinkInfo(source, target), network)
            group.publish(key, asdict(link))
        elif group.index == target:
            _receive(group, server, f"open/{source}/{target}", window_s=window_s)
        found.append(LinkInfo(**group.wait_for(key, group.wait_s + 20 * window_s)))
    return found


def _send(group: HostGroup, to: HostInfo, link: LinkInfo, network: HostNetwork) -> LinkInfo:
    key = f"open/{link.source}/{link.target}"
    try:
        if network.overlay is not None:
            _await_link(network.overlay, link.target, to.port)
        connection = socket.create_connection((to.address, to.port), timeout=_CONNECT_S)
    except OSError as error:
        group.publish(key, False)
        reason = "no answer" if isinstance(error, TimeoutError) else str(error.strerror)
        return LinkInfo(link.source, link.target, closed=reason)
    group.publish(key, True)
    with connection:
        connection.settimeout(group.wait_s)
        trip_s = ping(connection)
        offset_s = _clock_offset_s(connection)
        connection.sendall(_DOUBLE.pack(trip_s))
        flood(connection)
        mtu, bbr = connection.getsockopt(socket.IPPROTO_IP, _IP_MTU), False
    if network.overlay is not None:
        name = network.overlay.roster.hosts[link.target].name
        state = network.overlay.client().ask("status")["links"][name]
        mtu, bbr = state["path_mtu"], state["bbr"]
    rate_bps = group.wait_for(f"rate/{link.source}/{link.target}")
    return LinkInfo(link.source, link.target, None, trip_s, rate_bps, offset_s, mtu, bbr)


def _await_link(overlay: Overlay, target: int, port: int) -> None:
    """Have an address here lead to a port of that host's, when the two are connected.

    Raises:
        TimeoutError: they are not.
    """
    client, name = overlay.client(), overlay.roster.hosts[target].name
    client.ask("forward", host=target, port=port, traffic="pipeline")
    limit_s = time.monotonic() + _CONNECT_S
    while not client.ask("status")["links"][name]["connected"]:
        if time.monotonic() > limit_s:
            raise TimeoutError
        time.sleep(_POLL_S)


def _receive(group: HostGroup, server: socket.socket, key: str, *, window_s: float) -> None:
    if not group.wait_for(key):
        return
    connection, _ = server.accept()
    with connection:
        connection.settimeout(group.wait_s)
        answer_pings(connection)
        connection.sendall(_DOUBLE.pack(_clock(connection)))
        trip_s = _DOUBLE.unpack(connection.recv(_DOUBLE.size, socket.MSG_WAITALL))[0]
        warm_up_s = window_s / 2 + _WARM_UP_TRIPS * trip_s
        rate_bps = payload_bps(connection, warm_up_s, window_s + 4 * trip_s)
    group.publish(key.replace("open", "rate"), rate_bps)


def _clock_offset_s(connection: socket.socket) -> float:
    """How far the other clock is ahead: read in the middle of a round trip, as NTP does."""
    begin_s = time.time()
    connection.sendall(b"t")
    theirs_s = _DOUBLE.unpack(connection.recv(_DOUBLE.size, socket.MSG_WAITALL))[0]
    return float(theirs_s) - (begin_s + time.time()) / 2


def _clock(connection: socket.socket) -> float:
    connection.recv(1)
    return time.time()
