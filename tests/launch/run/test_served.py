"""The page that a run serves while it trains."""

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.ports import free_port
from tests.runs import records as steps_of
from tests.runs import write_run
from tests.waiting import until
from thinpipe.launch.run import records


def server_of(folder: Path) -> psutil.Process:
    return next(p for p in psutil.Process().children() if str(folder) in p.cmdline())


def test_a_page_is_named_once_it_is_there(tmp_path: Path) -> None:
    folder, port, notes = write_run(tmp_path / "run", steps_of(2)), free_port(), list[str]()
    with records.served(folder, port, notes.append):
        assert notes == [], "nothing listens yet"
        until(lambda: notes)
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert notes == [f"watch at http://localhost:{port}/"]


def test_a_page_without_a_port_is_not_named(tmp_path: Path) -> None:
    folder, notes = write_run(tmp_path / "run", steps_of(2)), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with records.served(folder, taken.getsockname()[1], notes.append):
            server = server_of(folder)
            until(lambda: server.status() == psutil.STATUS_ZOMBIE)
        assert notes == []


def test_a_server_that_hangs_does_not_keep_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_LEAVE_S", 0.2)
    folder, notes = write_run(tmp_path / "run", steps_of(2)), list[str]()
    with records.served(folder, free_port(), notes.append):
        until(lambda: notes)
        server = server_of(folder)
        os.kill(server.pid, signal.SIGSTOP)
    assert not server.is_running()
