"""Real carriers on one machine: how they come into a run, and whom they do not believe."""

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from tests.commands import PATIENCE_S
from tests.launch.overlay.links.pair import Wire
from tests.launch.test_train import wait_until
from tests.ports import free_port
from thinpipe.launch.overlay import keys
from thinpipe.launch.overlay.control import OverlayError
from thinpipe.launch.overlay.links.handshake import Hello, Welcome
from thinpipe.launch.overlay.process import Overlay
from thinpipe.launch.overlay.settings import Settings

pytestmark = pytest.mark.dist


class Run:
    """Hosts of one run; the first is where they meet."""

    def __init__(self, folder: Path, needed: int) -> None:
        self.key, self.port, self._needed = folder / "run.key", free_port(), needed
        keys.new(self.key)
        self.hosts = [self._host("h0", None, ("127.0.0.1", self.port))]
        wait_until(self._listens, PATIENCE_S)

    def host(self, name: str, coordinator: tuple[str, int] | None = None) -> Overlay:
        where = coordinator or ("127.0.0.1", self.port)
        self.hosts.append(self._host(name, where, ("127.0.0.1", 0)))
        return self.hosts[-1]

    def close(self) -> None:
        for host in self.hosts:
            host.close()

    def _listens(self) -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", self.port)) == 0

    def _host(
        self, name: str, coordinator: tuple[str, int] | None, listen: tuple[str, int]
    ) -> Overlay:
        return Overlay(
            Settings(
                name=name,
                key_file=self.key,
                needed=self._needed,
                listen=listen,
                coordinator=coordinator,
                patience_s=PATIENCE_S,
                store_port=1,
            )
        )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, 2)
    yield run
    run.close()


def ignore(_text: str) -> None:
    pass


def say(run: Run, hello: Hello) -> Welcome:
    """What host 0 answers."""
    text = hello.model_dump_json().encode()
    sock = socket.create_connection(("127.0.0.1", run.port), timeout=PATIENCE_S)
    with keys.contexts(run.key)[1].wrap_socket(sock) as connection:
        connection.sendall(struct.pack("!I", len(text)) + text)
        (length,) = struct.unpack("!I", connection.recv(4))
        return Welcome.model_validate_json(connection.recv(length))


def test_connections_of_the_past_are_not_believed(run: Run) -> None:
    one = run.host("h1")
    one.join(PATIENCE_S, ignore)
    run.hosts[0].join(PATIENCE_S, ignore)
    incarnations = {host.name: host.incarnation for host in one.roster.hosts}
    known = {"purpose": "link", "name": "h1", "to": "h0", "run": one.roster.run, "session": "x"}
    for wrong, reason in (
        ({"incarnation": incarnations["h1"], "attempt": 0}, "overtaken by a later connection"),
        ({"incarnation": "earlier", "attempt": 99}, "of before a restart"),
        ({"incarnation": incarnations["h1"], "attempt": 99, "run": "other"}, "another run"),
    ):
        assert reason in say(run, Hello.model_validate({**known, **wrong})).refused
    links = run.hosts[0].client().ask("status")["links"]
    assert links["h1"]["connected"]
    assert links["h1"]["resumed"] == 0


def test_a_host_whose_connection_breaks_while_it_waits_comes_in_again(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    wire = Wire(("127.0.0.1", run.port))
    one, said = run.host("h1", wire.address), SimpleQueue[str]()
    thread = threading.Thread(target=one.join, args=(PATIENCE_S, said.put))
    thread.start()
    assert said.get(timeout=PATIENCE_S) == "h0 joined, 2 of 3 machines"
    wire.cut()
    assert said.get(timeout=PATIENCE_S).endswith("; trying again")
    run.host("h2").join(PATIENCE_S, ignore)
    thread.join(PATIENCE_S)
    assert [host.name for host in one.roster.hosts] == ["h0", "h1", "h2"]
    wire.close()
    run.close()


def test_a_second_machine_of_a_name_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    refused: SimpleQueue[str] = SimpleQueue()

    def join(host: Overlay) -> None:
        try:
            host.join(PATIENCE_S, ignore)
        except OverlayError as error:
            refused.put(str(error))

    threads = [threading.Thread(target=join, args=(run.host("h1"),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    reason = refused.get(timeout=PATIENCE_S)
    assert "another machine is named 'h1', or this one was started twice" in reason
    run.close()
    for thread in threads:
        thread.join()


def test_those_that_a_run_expects_and_that_did_not_come_are_named(run: Run) -> None:
    with pytest.raises(OverlayError, match=r"only h0 did; missing: h1, h2$"):
        run.hosts[0].join(2, ignore, expected=["h0", "h1", "h2"])


ASK = """
import sys
from thinpipe.launch.overlay.control import Client
client = Client(sys.argv[1])
client.ask("expose", port=int(sys.argv[2]))
client.ask("forward", host=1, port=int(sys.argv[2]), traffic="pipeline")
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_process_asked_for_ends_with_it(run: Run) -> None:
    run.host("h1").join(PATIENCE_S, ignore)
    here = run.hosts[0]
    here.join(PATIENCE_S, ignore)
    port = free_port()

    def reached() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex((here.address("h1"), port)) == 0

    own = psutil.Process(here._process.pid)
    before = own.num_fds()
    command = [sys.executable, "-c", ASK, here.socket, str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"asked\n"
        assert reached()
        time.sleep(6)
        assert reached(), "its process lives"
    wait_until(lambda: not reached(), PATIENCE_S)
    wait_until(lambda: own.num_fds() <= before, PATIENCE_S)
