"""Measures payload rate and round-trip time of idle links, one at a time."""

import socket
import time
from dataclasses import dataclass
from functools import partial

from thinpipe.launch.host.links import FRAME_BYTES
from thinpipe.launch.host.tcp_probe import answer_pings, flood, payload_bps, ping
from thinpipe.launch.lab.names import host_address
from thinpipe.launch.lab.network import ShapedNetwork

_PORT = 5201  # iperf3's; an emulated host has its ports for itself
_CONNECT_S = 10.0  # until the other host's process listens: it is forked at the same time
_SHORTEST_S, _LONGEST_S = 0.4, 5.0  # in between 100 frames: below 240 kbit/s there are fewer


@dataclass(frozen=True)
class LinkProbe:
    """One direction of a link: nominal rate and delay, and those that TCP achieved."""

    nominal_bps: float | None
    """Bits per second on the wire; `None`: unlimited."""
    achieved_bps: float
    """Payload bits per second: at most 0.956 of nominal; the rest is headers."""
    nominal_round_trip_s: float
    round_trip_s: float

    @property
    def ratio(self) -> float | None:
        """Achieved over nominal; `None` if the link is unlimited."""
        return None if self.nominal_bps is None else self.achieved_bps / self.nominal_bps


def probe_link(network: ShapedNetwork, source: int, target: int) -> LinkProbe:
    """Measure the link from `source` to `target` while nothing else runs."""
    nominal_bps = network.spec.rate_bps(source, target)
    delay_s = network.spec.delay_s
    round_trip_s = delay_s.get((source, target), 0.0) + delay_s.get((target, source), 0.0)
    window_s = _window_s(nominal_bps, round_trip_s)
    warm_up_s = window_s / 2 + 10 * round_trip_s  # slow start doubles the rate once a round trip
    job = partial(_measure, source=source, target=target, warm_up_s=warm_up_s, window_s=window_s)
    limit_s = 2 * _CONNECT_S + 4 * (warm_up_s + window_s)
    ping_s, achieved_bps = network.run(job, hosts=(source, target), timeout_s=limit_s)
    return LinkProbe(nominal_bps, achieved_bps, round_trip_s, ping_s)


def _window_s(nominal_bps: float | None, round_trip_s: float) -> float:
    frames_s = 0.0 if nominal_bps is None else 100 * FRAME_BYTES * 8 / nominal_bps
    return min(_LONGEST_S, max(_SHORTEST_S, frames_s, 8 * round_trip_s))


def _measure(host: int, *, source: int, target: int, warm_up_s: float, window_s: float) -> float:
    """On `source` the round trip in seconds, on `target` the payload rate in bit/s."""
    if host == source:
        with _connect(host_address(target)) as link:
            round_trip_s = ping(link)  # before the flood, which fills queues
            flood(link)
            return round_trip_s
    with socket.create_server((host_address(host), _PORT)) as server:
        server.settimeout(_CONNECT_S)
        link, _ = server.accept()
    with link:
        answer_pings(link)
        return payload_bps(link, warm_up_s, window_s)


def _connect(address: str) -> socket.socket:
    limit = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=_CONNECT_S)
        except ConnectionRefusedError:  # the other end is not listening yet
            if time.monotonic() > limit:
                raise
            time.sleep(0.01)
