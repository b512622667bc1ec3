"""Measures every link: connectivity, round trip, clock offset, and then rates."""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from thinpipe.launch.doctor.group import DoctorError, HostGroup
from thinpipe.launch.doctor.host import HostInfo
from thinpipe.launch.host.interfaces import serve
from thinpipe.launch.host.links import Pair
from thinpipe.launch.host.tcp_probe import answer_pings, flood, payload_bps, ping
from thinpipe.launch.host.words import format_duration
from thinpipe.launch.net.overlay.process import Overlay
from thinpipe.launch.net.ranks.network import HostNetwork

_PAUSE_S = 5.0  # at least, between two lines of progress
_CONNECT_S = 3.0  # a lost SYN is sent again after 1 s; a firewall that drops it never answers
_POLL_S = 0.05  # short against the second that a link is measured
_MTU_OF = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
"""The options IP_MTU and IPV6_MTU, which are not in the socket module."""
_DOUBLE = struct.Struct("!d")
_START = b"s"
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


_Open = tuple[LinkInfo, socket.socket | None]
"""A link as far as it is measured, and its connection, if it is open."""


def listen(network: HostNetwork) -> socket.socket:
    """Listen on a port that the system chooses, as gloo does, and let the other hosts reach it."""
    server = serve((network.address, 0), backlog=64)
    if network.overlay is not None:
        network.overlay.client().ask("expose", port=server.getsockname()[1])
    return server


def measure_links(
    group: HostGroup,
    hosts: list[HostInfo],
    server: socket.socket,
    network: HostNetwork,
    window_s: float,
    report: Callable[[str], None],
) -> list[LinkInfo]:
    """Measure all ordered pairs; a collective with the same result on every host.

    Disjoint pairs at once: first the round trips of all, which floods would lengthen where links
    share an uplink, then the rates. `report` is told how far this host is.
    """
    server.settimeout(group.wait_s)
    own = list(own_links(group.index, group.hosts))
    with contextlib.ExitStack() as stack:
        opened: list[_Open] = []
        for source, target in own:
            link = LinkInfo(source, target)
            with _naming_the_lost(hosts, link):
                link, connection = (
                    _connect(group, hosts[target], link, network)
                    if group.index == source
                    else _accept(group, link, server)
                )
            opened.append((link, connection and stack.enter_context(connection)))
        group.gather("round trips", True)
        measured, progress = [], Progress(len(own), report)
        for link, connection in opened:
            with _naming_the_lost(hosts, link):
                rate_bps = _rate(group, link, connection, window_s) if connection else 0.0
            measured.append(replace(link, rate_bps=rate_bps))
            progress.advance(f"{hosts[link.source].name} -> {hosts[link.target].name}")
    if network.overlay is not None:
        measured = [_with_state(link, group.index, network.overlay) for link in measured]
    sent = [asdict(link) for link in measured if link.source == group.index]
    everyone = group.gather("links", sent, group.wait_s + 4 * window_s * group.hosts)
    found = [LinkInfo(**link) for links in everyone for link in links]
    return sorted(found, key=lambda link: (link.source, link.target))


def _connect(group: HostGroup, to: HostInfo, link: LinkInfo, network: HostNetwork) -> _Open:
    key = f"{link.source} to {link.target}"
    group.wait_for(f"ready for {key}")
    try:
        if network.overlay is not None:
            _await_link(network.overlay, link.target, to.port)
        connection = socket.create_connection((to.address, to.port), timeout=_CONNECT_S)
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else str(error.strerror)
        group.publish(f"open {key}", False)
        return replace(link, closed=reason), None
    group.publish(f"open {key}", True)
    connection.settimeout(group.wait_s)
    trip_s = ping(connection)
    begin_s = time.time()  # as in NTP, the other clock is read in the middle of a round trip
    connection.sendall(b"t")
    offset_s = _number(connection) - (begin_s + time.time()) / 2
    connection.sendall(_DOUBLE.pack(trip_s))
    mtu = connection.getsockopt(*_MTU_OF[connection.family])
    link = replace(link, round_trip_s=trip_s, clock_offset_s=offset_s, path_mtu=mtu)
    return link, connection


def _accept(group: HostGroup, link: LinkInfo, server: socket.socket) -> _Open:
    key = f"{link.source} to {link.target}"
    group.publish(f"ready for {key}", True)  # before, its connection could be taken for another
    if not group.wait_for(f"open {key}"):
        return replace(link, closed="its source says why"), None
    connection, _ = server.accept()
    connection.settimeout(group.wait_s)
    answer_pings(connection)
    connection.recv(1)
    connection.sendall(_DOUBLE.pack(time.time()))
    return replace(link, round_trip_s=_number(connection)), connection


def _rate(group: HostGroup, link: LinkInfo, connection: socket.socket, window_s: float) -> float:
    """bit/s of payload: the target measures when it is ready, the source floods until then."""
    key = f"rate of {link.source} to {link.target}"
    if group.index == link.source:
        connection.recv(len(_START), socket.MSG_WAITALL)
        flood(connection)
        return float(group.wait_for(key))
    connection.sendall(_START)
    warm_up_s = window_s / 2 + _WARM_UP_TRIPS * link.round_trip_s
    rate_bps = payload_bps(connection, warm_up_s, window_s + 4 * link.round_trip_s)
    connection.close()
    group.publish(key, rate_bps)
    return rate_bps


@contextlib.contextmanager
def _naming_the_lost(hosts: Sequence[HostInfo], link: LinkInfo) -> Iterator[None]:
    try:
        yield
    except (OSError, DoctorError) as error:
        where = f"{hosts[link.source].name} -> {hosts[link.target].name}"
        text = str(error) if isinstance(error, DoctorError) else f"{error}; start doctor again"
        raise DoctorError(f"{where}: {text}") from None


def _with_state(link: LinkInfo, host: int, overlay: Overlay) -> LinkInfo:
    if link.source != host or link.closed is not None:
        return link
    state = overlay.client().ask("status")["links"][overlay.peer_list.hosts[link.target].name]
    return replace(link, path_mtu=state["path_mtu"], bbr=state["bbr"])


def _await_link(overlay: Overlay, target: int, port: int) -> None:
    """Have an address here lead to a port of that host's, when the two are connected."""
    client, name = overlay.client(), overlay.peer_list.hosts[target].name
    client.ask("forward", host=target, port=port, traffic="pipeline")
    limit_s = time.monotonic() + _CONNECT_S
    while not client.ask("status")["links"][name]["connected"]:
        if time.monotonic() > limit_s:
            raise TimeoutError
        time.sleep(_POLL_S)


def _number(connection: socket.socket) -> float:
    data = connection.recv(_DOUBLE.size, socket.MSG_WAITALL)
    if len(data) < _DOUBLE.size:
        raise ConnectionError("the other end closed the connection")
    return float(_DOUBLE.unpack(data)[0])


def rounds(hosts: int) -> list[list[Pair]]:
    """All pairs (lower, higher) of `hosts`, in rounds of pairs that share no host.

    The circle method of round-robin tournaments: one host stays, the others move on by a place.
    """
    players: list[int | None] = list(range(hosts))
    if hosts % 2:
        players.append(None)  # who meets it pauses
    found = []
    for _ in range(len(players) - 1):
        opposite = reversed(players)
        half = zip(players[: len(players) // 2], opposite, strict=False)
        found.append([(min(a, b), max(a, b)) for a, b in half if a is not None and b is not None])
        players.insert(1, players.pop())
    return found


def own_links(host: int, hosts: int) -> Iterator[Pair]:
    """The links (from, to) that a host takes part in, in order; both directions of a pair."""
    for pairs in rounds(hosts):
        for a, b in pairs:
            if host in (a, b):
                yield a, b
                yield b, a


class Progress:
    """Says how many of a host's links are measured, at most every few seconds."""

    def __init__(self, total: int, report: Callable[[str], None]) -> None:
        self._total, self._report, self._done = total, report, 0
        self._begin_s = self._said_s = time.monotonic()

    def advance(self, what: str) -> None:
        self._done += 1
        now_s = time.monotonic()
        if now_s - self._said_s < _PAUSE_S or self._done == self._total:
            return
        self._said_s = now_s
        left_s = (now_s - self._begin_s) / self._done * (self._total - self._done)
        self._report(
            f"measured {self._done} of this host's {self._total} links, the last {what}; "
            f"{format_duration(left_s)} left"
        )
