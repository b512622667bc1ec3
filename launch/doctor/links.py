"""Every way between two hosts, one after the other: open, how far, how fast, clocks."""

import socket
import struct
import time
from dataclasses import asdict, dataclass

from thinpipe.launch.doctor.host import HostFacts
from thinpipe.launch.doctor.meeting import Meeting
from thinpipe.launch.host import tcp_probe as flow
from thinpipe.launch.host.links import links

_CONNECT_S = 3.0
_IP_MTU = 14  # Linux's number; Python has no name for it
_DOUBLE = struct.Struct("!d")
_WARM_UP_TRIPS = 10  # slow start doubles the rate once a round trip


@dataclass(frozen=True)
class LinkFacts:
    """From one host to another, by place. `rate_bps` is payload; `clock_offset_s` is how much the
    target's clock is ahead; `closed` says why there is no connection, then the rest is 0.
    """

    source: int
    target: int
    closed: str | None = None
    round_trip_s: float = 0.0
    rate_bps: float = 0.0
    clock_offset_s: float = 0.0
    path_mtu: int = 0


def listen(address: str) -> socket.socket:
    """A port that the system chooses, as gloo's are."""
    return socket.create_server((address, 0), backlog=64)


def measure_links(
    meeting: Meeting, hosts: list[HostFacts], server: socket.socket, *, window_s: float
) -> list[LinkFacts]:
    """All ordered pairs; every host calls it and gets the same list.

    Raises:
        DoctorError: a host went away.
    """
    server.settimeout(meeting.wait_s)
    found = []
    for source, target in links(meeting.hosts):
        key = f"link/{source}/{target}"
        if meeting.place == source:
            link = _send(meeting, hosts[target], LinkFacts(source, target), window_s=window_s)
            meeting.tell(key, asdict(link))
        elif meeting.place == target:
            _receive(meeting, server, f"open/{source}/{target}", window_s=window_s)
        found.append(LinkFacts(**meeting.hear(key, meeting.wait_s + 20 * window_s)))
    return found


def _send(meeting: Meeting, to: HostFacts, link: LinkFacts, *, window_s: float) -> LinkFacts:
    key = f"open/{link.source}/{link.target}"
    try:
        connection = socket.create_connection((to.address, to.port), timeout=_CONNECT_S)
    except OSError as error:
        meeting.tell(key, False)
        reason = "no answer" if isinstance(error, TimeoutError) else str(error.strerror)
        return LinkFacts(link.source, link.target, closed=reason)
    meeting.tell(key, True)
    with connection:
        connection.settimeout(meeting.wait_s)
        trip_s = flow.ping(connection)
        offset_s = _clock_offset_s(connection)
        connection.sendall(_DOUBLE.pack(trip_s))
        flow.flood(connection)
        mtu = connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    rate_bps = meeting.hear(f"rate/{link.source}/{link.target}")
    return LinkFacts(link.source, link.target, None, trip_s, rate_bps, offset_s, mtu)


def _receive(meeting: Meeting, server: socket.socket, key: str, *, window_s: float) -> None:
    if not meeting.hear(key):
        return
    connection, _ = server.accept()
    with connection:
        connection.settimeout(meeting.wait_s)
        flow.answer_pings(connection)
        connection.sendall(_DOUBLE.pack(_clock(connection)))
        trip_s = _DOUBLE.unpack(connection.recv(_DOUBLE.size, socket.MSG_WAITALL))[0]
        warm_up_s = window_s / 2 + _WARM_UP_TRIPS * trip_s
        rate_bps = flow.payload_bps(connection, warm_up_s, window_s + 4 * trip_s)
    meeting.tell(key.replace("open", "rate"), rate_bps)


def _clock_offset_s(connection: socket.socket) -> float:
    """How far the other clock is ahead: read in the middle of a round trip, as NTP does."""
    begin_s = time.time()
    connection.sendall(b"t")
    theirs_s = _DOUBLE.unpack(connection.recv(_DOUBLE.size, socket.MSG_WAITALL))[0]
    return float(theirs_s) - (begin_s + time.time()) / 2


def _clock(connection: socket.socket) -> float:
    connection.recv(1)
    return time.time()
