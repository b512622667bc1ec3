"""Requests to a run that starts, is slow, or ends."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from thinpipe.launch.lab import control
from thinpipe.launch.lab.spec import Change, NetworkSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")

RUN = 1_000_000_000 + os.getpid()  # no process has this number
CHANGE = Change(rate="1mbit")


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with control.listen(RUN) as listening:
        yield listening


def answer_one(server: socket.socket) -> threading.Thread:
    def apply(change: Any) -> NetworkSpec:
        return NetworkSpec.of(2, change.rate)

    thread = threading.Thread(target=control.answer, args=(server, apply))
    thread.start()
    return thread


def test_a_run_that_does_not_listen_yet_is_not_listed() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as starting:
        starting.bind(f"\0thinpipe-shaped-{RUN}")
        assert RUN not in control.runs()
        starting.listen()
        assert RUN in control.runs()


def test_a_slow_client_is_waited_for(server: socket.socket) -> None:
    answering = answer_one(server)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"\0thinpipe-shaped-{RUN}")
        time.sleep(0.5)
        client.send(CHANGE.model_dump_json().encode())
        assert json.loads(client.recv(1000)) == {"done": "1 Mbit/s each way"}
    answering.join()


def test_a_run_that_ends_before_it_answers_is_named(server: socket.socket) -> None:
    def hang_up() -> None:
        client, _ = server.accept()
        with client:
            client.recv(1000)

    ending = threading.Thread(target=hang_up)
    ending.start()
    with pytest.raises(ValueError, match=f"--run = {RUN}: did not answer: Connection reset"):
        control.request(CHANGE, RUN)
    ending.join()
