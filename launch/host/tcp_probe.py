"""One TCP connection as an instrument: round trips, then payload per second."""

import select
import socket
import time

CHUNK = 1 << 18
_LEAST_PINGS, _MOST_PINGS, _PINGS_S = 5, 20, 0.5
_PING, _ENOUGH = b"x", b"."


def answer_pings(link: socket.socket) -> None:
    """The far end of `ping`."""
    while link.recv(1) == _PING:
        link.sendall(_PING)


def ping(link: socket.socket) -> float:
    """Seconds of the fastest of several round trips of one byte.

    A busy machine makes most of them longer: there are at least five, and more in half a second.
    """
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips: list[float] = []
    while len(trips) < _LEAST_PINGS or (len(trips) < _MOST_PINGS and sum(trips) < _PINGS_S):
        begin = time.perf_counter()
        link.sendall(_PING)
        link.recv(1)
        trips.append(time.perf_counter() - begin)
    link.sendall(_ENOUGH)
    return min(trips)


def flood(link: socket.socket) -> None:
    """Send until the far end has seen enough and closes."""
    chunk = bytes(CHUNK)
    try:
        while True:
            link.sendall(chunk)
    except (ConnectionResetError, BrokenPipeError):
        return


def payload_bps(link: socket.socket, warm_up_s: float, window_s: float) -> float:
    """The far end of `flood`: bits per second after the warm-up; the caller closes."""
    buffer = bytearray(CHUNK)
    begin = time.perf_counter()
    while time.perf_counter() - begin < warm_up_s:
        link.recv_into(buffer)
    _catch_up(link, buffer, window_s)
    received, begin = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < window_s:
        received += link.recv_into(buffer)
    return received * 8 / elapsed


def _catch_up(link: socket.socket, buffer: bytearray, limit_s: float) -> None:
    """Read what piled up while others had the processor: it did not arrive in the window."""
    waiting, begin = select.poll(), time.perf_counter()
    waiting.register(link, select.POLLIN)
    while waiting.poll(0) and time.perf_counter() - begin < limit_s:  # some links never run dry
        link.recv_into(buffer)
