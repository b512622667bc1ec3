"""Settings and readings of one TCP socket between two hosts."""

import socket
import struct
from dataclasses import dataclass

_NOTSENT_LOWAT = 25  # TCP_NOTSENT_LOWAT; socket has no name for it
_LEAST_UNSENT, _MOST_UNSENT = 16 * 1024, 128 * 1024  # a TLS record; the largest frame
_UNSENT_S = 0.002  # of the link's rate: so long an urgent frame waits behind others
_LONG_ROUND_TRIP_S = 0.005  # over shorter ones BBR gains nothing
_OWN_QUEUE_S, _OTHERS_QUEUE_S = 0.005, 0.02  # jitter on the way should be less than the second
_LEAST_SHARE, _LEAST_NBYTES = 1 / 8, 32 * 1024  # so that all comes in the end


_SEGMENTS = (0, 1160, 512)
"""Bytes: the kernel's choice, IPv6's least MTU of 1280 (as VPNs have), IPv4's of 576."""


@dataclass
class Segments:
    """How large the packets of the next connection may be.

    A tunnel on the way may drop large packets, and a firewall the ICMP messages that say so: then
    connections begin, and stall. Each that does so is followed by one of smaller segments, and the
    smallest by the kernel's choice again.
    """

    level: int = 0
    _established: bool = False

    def limit(self, sock: socket.socket) -> None:
        """For a socket that connects now; the peer learns it too."""
        self._established = False
        if _SEGMENTS[self.level]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENTS[self.level])

    def established(self) -> None:
        """Small packets get through."""
        self._established = True

    def stalled(self) -> None:
        """Nothing came over it any more."""
        if self._established:  # else nothing got through, whatever its size
            self.level = (self.level + 1) % len(_SEGMENTS)


@dataclass(frozen=True)
class TcpState:
    """The kernel's figures of a connection."""

    round_trip_s: float
    """The shortest lately."""
    usual_round_trip_s: float
    """A moving mean; above the shortest by what waits in queues on the way."""
    retransmitted: int
    """Segments sent again, over the connection's life."""
    last_answer_s: float
    """Since the other kernel last acknowledged anything: small, then its process hangs."""
    path_mtu: int
    rate_Bps: int
    """Bytes per second that were delivered lately."""
    under_way_nbytes: int
    """What the other kernel has not acknowledged."""

    def has_room(self, *, is_shared: bool) -> bool:
        """Whether more can be sent that takes only what other traffic leaves of the path.

        That may be of other hosts to the same one: then packets wait in queues on the way, and
        round trips take longer (as in LEDBAT, RFC 6817). If so, or if the path `is_shared` for
        sure, it is filled to an eighth; else a queue of 5 ms is made.
        """
        queues_s = self.usual_round_trip_s - self.round_trip_s
        fill_s = self.round_trip_s + _OWN_QUEUE_S
        if is_shared or queues_s > _OTHERS_QUEUE_S:
            fill_s = self.round_trip_s * _LEAST_SHARE
        return self.under_way_nbytes < max(_LEAST_NBYTES, self.rate_Bps * fill_s)


def tune(sock: socket.socket) -> None:
    """Send at once, without waiting for more."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit_unsent(sock, 0)


def limit_unsent(sock: socket.socket, rate_Bps: int) -> int:
    """Keep little in the kernel, so that urgent frames overtake what waits; return how much.

    It is what a link of that rate (bytes per second) carries in 2 ms, from 16 to 128 KiB.
    """
    nbytes = min(_MOST_UNSENT, max(_LEAST_UNSENT, int(rate_Bps * _UNSENT_S)))
    sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, nbytes)
    return nbytes


def read_state(sock: socket.socket) -> TcpState | None:
    """The kernel's view; None where it has none."""
    try:
        # up to tcpi_delivery_rate; the offsets are those of struct tcp_info (linux/tcp.h)
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 168)
    except OSError:
        return None
    last_ack_ms, path_mtu, _, usual_us = struct.unpack_from("=4I", info, 56)
    # the least round trip: load does not count
    unsent_nbytes, round_trip_us = struct.unpack_from("=2I", info, 144)
    segment_nbytes, _, segments = struct.unpack_from("=3I", info, 16)
    return TcpState(
        round_trip_s=round_trip_us / 1e6,
        usual_round_trip_s=usual_us / 1e6,
        retransmitted=struct.unpack_from("=I", info, 100)[0],
        last_answer_s=last_ack_ms / 1e3,
        path_mtu=path_mtu,
        rate_Bps=struct.unpack_from("=Q", info, 160)[0],
        under_way_nbytes=segment_nbytes * segments + unsent_nbytes,
    )


def choose_congestion_control(sock: socket.socket) -> bool:
    """Use BBR where the round trip is long; return whether it is in use.

    Cubic forgets the rate of a connection that was idle for a moment and starts over, in every
    step of training; BBR remembers it (Cardwell et al. 2016). On short round trips it gains
    nothing.
    """
    state = read_state(sock)
    if state is None or state.round_trip_s < _LONG_ROUND_TRIP_S:
        return False
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:  # not in this kernel, or not allowed to this user
        return False
    return True
