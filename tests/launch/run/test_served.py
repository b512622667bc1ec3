"""The page that a run serves while it trains."""

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.ports import free_port
from tests.runs import records as steps_of
from tests.runs import write_run
from tests.waiting import until
from thinpipe.launch.run import records


def servers_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if str(folder) in process.cmdline():
                found.append(process)
    return found


def test_a_page_is_named_once_it_is_there(tmp_path: Path) -> None:
    folder, port, notes = write_run(tmp_path / "run", steps_of(2)), free_port(), list[str]()
    with records.served(folder, port, notes.append, until_exit=False):
        assert notes == [], "nothing listens yet"
        until(lambda: notes)
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert notes == [f"watch at http://localhost:{port}/"]


def test_a_page_without_a_port_is_not_named(tmp_path: Path) -> None:
    folder, notes = write_run(tmp_path / "run", steps_of(2)), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with records.served(folder, taken.getsockname()[1], notes.append, until_exit=False):
            until(lambda: not servers_of(folder))
        assert notes == []


def test_nobody_waits_for_a_server_that_hangs(tmp_path: Path) -> None:
    folder, notes = write_run(tmp_path / "run", steps_of(2)), list[str]()
    with records.served(folder, free_port(), notes.append, until_exit=False):
        until(lambda: notes)
        (server,) = servers_of(folder)
        os.kill(server.pid, signal.SIGSTOP)
        left_s = time.monotonic()
    assert time.monotonic() - left_s < 1
    os.kill(server.pid, signal.SIGCONT)
    until(lambda: not server.is_running())


def test_a_server_that_shows_samples_stays_until_its_process_ends(tmp_path: Path) -> None:
    folder, port, notes = write_run(tmp_path / "run", steps_of(2)), free_port(), list[str]()
    with records.served(folder, port, notes.append, until_exit=True):
        until(lambda: notes)
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    server = records._kept.pop()
    assert server.poll() is None
    assert server.stdin is not None
    server.stdin.close()
    until(lambda: server.poll() is not None)
