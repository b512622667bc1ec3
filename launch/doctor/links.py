"""Measures every link, one after the other: connectivity, round trip, rate, clock offset."""

import socket
import struct
import time
from dataclasses import asdict, dataclass

from thinpipe.launch.doctor.group import HostGroup
from thinpipe.launch.doctor.host import HostInfo
from thinpipe.launch.host.links import links
from thinpipe.launch.host.tcp_probe import answer_pings, flood, payload_bps, ping

_CONNECT_S = 3.0
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


def listen(address: str) -> socket.socket:
    """Listen on a port that the system chooses, as gloo does."""
    return socket.create_server((address, 0), backlog=64)


def measure_links(
    group: HostGroup, hosts: list[HostInfo], server: socket.socket, *, window_s: float
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
            link = _send(group, hosts[target], LinkInfo(source, target), window_s=window_s)
            group.publish(key, asdict(link))
        elif group.index == target:
            _receive(group, server, f"open/{source}/{target}", window_s=window_s)
        found.append(LinkInfo(**group.wait_for(key, group.wait_s + 20 * window_s)))
    return found


def _send(group: HostGroup, to: HostInfo, link: LinkInfo, *, window_s: float) -> LinkInfo:
    key = f"open/{link.source}/{link.target}"
    try:
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
        mtu = connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    rate_bps = group.wait_for(f"rate/{link.source}/{link.target}")
    return LinkInfo(link.source, link.target, None, trip_s, rate_bps, offset_s, mtu)


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
