"""Measures round-trip time and payload rate of a TCP connection."""

import select
import socket
import time

CHUNK = 1 << 18  # in one call, so that Python takes little of the time
_LEAST_PINGS, _MOST_PINGS, _PINGS_S = 5, 20, 0.5  # of five, all were 20 ms late on a busy machine
_PING, _STOP = b"x", b"."


def answer_pings(link: socket.socket) -> None:
    """The remote end of `ping`."""
    while link.recv(1) == _PING:
        link.sendall(_PING)


def ping(link: socket.socket) -> float:
    """Seconds of the fastest of several one-byte round trips, as a busy machine delays most.

    At least five, and up to twenty within half a second.
    """
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips: list[float] = []
    while len(trips) < _LEAST_PINGS or (len(trips) < _MOST_PINGS and sum(trips) < _PINGS_S):
        begin = time.perf_counter()
        link.sendall(_PING)
        link.recv(1)
        trips.append(time.perf_counter() - begin)
    link.sendall(_STOP)
    return min(trips)


def flood(link: socket.socket) -> None:
    """Send until the remote end closes."""
    chunk = bytes(CHUNK)
    try:
        while True:
            link.sendall(chunk)
    except (ConnectionResetError, BrokenPipeError):
        return


def payload_bps(link: socket.socket, warm_up_s: float, window_s: float) -> float:
    """The receiving end of `flood`: bits per second after the warm-up; the caller closes."""
    buffer = bytearray(CHUNK)
    begin = time.perf_counter()
    while time.perf_counter() - begin < warm_up_s:
        link.recv_into(buffer)
    _drain(link, buffer, window_s)
    received, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < window_s:
        received += link.recv_into(buffer)
    return received * 8 / elapsed


def _drain(link: socket.socket, buffer: bytearray, limit_s: float) -> None:
    """Read what was received before the window, while this process was not scheduled."""
    poller, begin = select.poll(), time.perf_counter()
    poller.register(link, select.POLLIN)
    while poller.poll(0) and time.perf_counter() - begin < limit_s:  # fast links always have data
        link.recv_into(buffer)
