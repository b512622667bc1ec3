"""Measurements of a link while one of its ends is delayed."""

import itertools
import socket
import threading

import pytest

from thinpipe.launch.host import tcp_probe
from thinpipe.launch.host.tcp_probe import answer_pings, payload_bps, ping


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def test_one_quick_round_trip_among_slow_ones_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = connection()
    trips_s = [0.05] * 7 + [0.01] + [0.05] * 12
    clock_s = itertools.chain.from_iterable((0.0, trip_s) for trip_s in trips_s)
    monkeypatch.setattr(tcp_probe.time, "perf_counter", lambda: next(clock_s))
    with near, far:
        answering = threading.Thread(target=answer_pings, args=(far,))
        answering.start()
        assert ping(near) == 0.01
        near.sendall(b"next")
        answering.join()
        assert far.recv(4, socket.MSG_WAITALL) == b"next"


def test_data_received_before_the_window_is_not_counted() -> None:
    near, far = connection()
    enough = threading.Event()

    def trickle() -> None:
        while not enough.wait(0.01):
            near.sendall(b"x")

    with near, far:
        near.sendall(bytes(1 << 16))
        trickling = threading.Thread(target=trickle)
        trickling.start()
        try:
            assert payload_bps(far, warm_up_s=0, window_s=0.2) < 8 * (1 << 16) / 10
        finally:
            enough.set()
            trickling.join()
