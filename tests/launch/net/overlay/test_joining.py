"""Real relays on one machine: how they come into a run, and whom they do not believe."""

import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.commands import PATIENCE_S
from tests.launch.net.overlay.links.pair import Wire
from tests.launch.test_train import wait_until
from tests.ports import HAS_IPV6, free_port
from thinpipe.launch.host.interfaces import family_of
from thinpipe.launch.net.overlay import joining, keys
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.joining import Joiner
from thinpipe.launch.net.overlay.links.handshake import Hello, Rejected, Welcome, send
from thinpipe.launch.net.overlay.links.loop import Loop
from thinpipe.launch.net.overlay.process import Overlay
from thinpipe.launch.net.overlay.settings import Settings

pytestmark = pytest.mark.dist


class Run:
    """Hosts of one run; the first is where they meet."""

    def __init__(self, folder: Path, needed: int, address: str = "127.0.0.1") -> None:
        self.key, self.port, self._needed = folder / "run.key", free_port(), needed
        self._address, self.hosts = address, list[Overlay]()
        keys.new(self.key)
        self.host("h0", port=self.port)
        wait_until(self._listens, PATIENCE_S)

    def host(
        self,
        name: str,
        *,
        at: tuple[str, int] | None = None,
        port: int = 0,
        key: Path | None = None,
        comes_later: bool = False,
    ) -> Overlay:
        """`at`: where it looks for the first, which looks for nobody."""
        self.hosts.append(
            Overlay(
                Settings(
                    name=name,
                    key_file=key or self.key,
                    needed=0 if comes_later else self._needed,
                    listen=(self._address, port),
                    coordinator=(at or (self._address, self.port)) if self.hosts else None,
                    patience_s=PATIENCE_S,
                    store_port=1,
                )
            )
        )
        return self.hosts[-1]

    def join(self) -> None:
        """All are connected to the first."""
        for host in self.hosts:
            host.join(PATIENCE_S, ignore)
        for host in self.hosts[1:]:
            wait_until(lambda name=host.name: self.link(name)["connected"], PATIENCE_S)

    def link(self, name: str) -> dict[str, Any]:
        """What the first knows of one."""
        found: dict[str, Any] = self.hosts[0].client().ask("status")["links"][name]
        return found

    def close(self) -> None:
        for host in self.hosts:
            host.close()

    def _listens(self) -> bool:
        with socket.socket(family_of(self._address)) as sock:
            return sock.connect_ex((self._address, self.port)) == 0


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two hosts that have joined, and are connected."""
    run = Run(tmp_path_factory.mktemp("met"), 2)
    run.host("h1")
    run.join()
    yield run
    run.close()


def ignore(_text: str) -> None:
    pass


def say(run: Run, hello: Hello, port: int = 0) -> Welcome:
    """What host 0 answers, or who listens at a port."""
    text = hello.model_dump_json().encode()
    sock = socket.create_connection(("127.0.0.1", port or run.port), timeout=PATIENCE_S)
    with keys.contexts(run.key)[1].wrap_socket(sock) as connection:
        connection.sendall(struct.pack("!I", len(text)) + text)
        (length,) = struct.unpack("!I", connection.recv(4))
        return Welcome.model_validate_json(connection.recv(length))


def test_connections_of_the_past_are_not_believed(met: Run) -> None:
    peers = met.hosts[1].peer_list
    instances = {host.name: host.instance for host in peers.hosts}
    known = {"purpose": "link", "name": "h1", "to": "h0", "run": peers.run, "session": "x"}
    for wrong, reason in (
        ({"instance": instances["h1"], "attempt": 0}, "overtaken by a later connection"),
        ({"instance": "earlier", "attempt": 99}, "stale session"),
        ({"instance": instances["h1"], "attempt": 99, "run": "other"}, "another run"),
    ):
        assert reason in say(met, Hello.model_validate({**known, **wrong})).rejected
    assert is_undisturbed(met)


def is_undisturbed(met: Run) -> bool:
    """Whether the two are connected as they were at first."""
    link = met.link("h1")
    return (link["connected"], link["resumed"], link["lost"]) == (True, 0, False)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_peer_that_looks_for_the_one_before_is_told_of_where_all_meet_alone(
    asked: int, tmp_path: Path
) -> None:
    """A newcomer is found at the address of a lost host: its user need not know."""
    run, port = Run(tmp_path, 3), free_port()
    run.host("h1", port=port)
    told = [SimpleQueue[str](), SimpleQueue[str]()]
    threads = [
        threading.Thread(target=host.join, args=(PATIENCE_S, queue.put))
        for host, queue in zip(run.hosts, told, strict=True)
    ]
    for thread in threads:
        thread.start()
    assert told[1].get(timeout=PATIENCE_S) == "h0 joined, 2 of 3 machines"
    old = {"purpose": "link", "name": "h2", "to": "h1", "run": "old", "session": "x"}
    hello = Hello.model_validate({**old, "instance": "y", "attempt": 1})
    assert say(run, hello, port if asked else 0).rejected == "another run"
    run.host("h2").join(PATIENCE_S, ignore)
    for thread in threads:
        thread.join(PATIENCE_S)
    words = [queue.get() for queue in told for _ in range(queue.qsize())]
    assert any("another run" in text for text in words) == (asked == 0), words
    run.close()


TWICE = "another machine is named 'h1', or this one was started twice"


def test_a_host_whose_connection_breaks_while_it_waits_comes_in_again(tmp_path: Path) -> None:
    run = Run(tmp_path, 3)
    wire = Wire(("127.0.0.1", run.port))
    one, said = run.host("h1", at=wire.address), SimpleQueue[str]()
    thread = threading.Thread(target=one.join, args=(PATIENCE_S, said.put))
    thread.start()
    assert said.get(timeout=PATIENCE_S) == "h0 joined, 2 of 3 machines"
    other = say(run, Hello(purpose="join", name="h1", hosts=3, instance="another"))
    assert TWICE in other.rejected
    assert other.again  # or the first one's connection broke a moment ago
    wire.cut()
    assert said.get(timeout=PATIENCE_S).endswith("; trying again")
    run.host("h2").join(PATIENCE_S, ignore)
    thread.join(PATIENCE_S)
    assert [host.name for host in one.peer_list.hosts] == ["h0", "h1", "h2"]
    wire.close()
    run.close()


def joiner_of(name: str) -> tuple[Joiner, list[str]]:
    """One that connects to nobody, and what it reports."""
    reports: list[str] = []
    joiner = Joiner(
        Loop(),
        ssl.create_default_context(),
        ("127.0.0.1", 1),
        Hello(purpose="join", name=name),
        joined=lambda *_: None,
        report=lambda event, **fields: reports.append(f"{event}: {fields['message']}"),
    )
    return joiner, reports


def test_a_name_that_stays_taken_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times, (joiner, reports) = iter((1.0, 8.0, 9.5)), joiner_of("h1")
    monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=lambda: next(times)))
    for _ in range(3):
        assert not reports
        joiner._failed(Rejected(Welcome(rejected=TWICE, again=True)))
    assert reports == [f"failed: {TWICE}"]


def test_one_that_is_started_twice_is_rejected_and_the_run_goes_on(met: Run) -> None:
    again = Hello(purpose="join", name="h1", hosts=2, instance="another")
    assert TWICE in say(met, again).rejected
    itself = Hello(purpose="join", name="h0", hosts=2, instance="another")
    assert "another machine is named 'h0'" in say(met, itself).rejected
    assert is_undisturbed(met)


def test_a_newcomer_takes_the_place_of_a_lost_host_and_its_name(tmp_path: Path) -> None:
    """It need not know it; a machine with a key of its own has no other name."""
    run = Run(tmp_path, 3)
    for name in ("h1", "h2"):
        run.host(name)
    run.join()
    with pytest.raises(OverlayError, match=r"\(h0, h1, h2\) is lost, so new cannot take the place"):
        run.host("new", comes_later=True).join(PATIENCE_S, ignore)
    run.hosts[2].close()
    wait_until(lambda: run.link("h2")["left"], PATIENCE_S)
    own = tmp_path / "own.key"
    keys.add(run.key, "own", own)
    with pytest.raises(OverlayError, match=r"for the name own alone, .* one for h2, which is lost"):
        run.host("own", key=own, comes_later=True).join(PATIENCE_S, ignore)
    newcomer = run.host("new", comes_later=True)
    newcomer.join(PATIENCE_S, ignore)
    assert newcomer.name == "h2"
    wait_until(lambda: run.link("h2")["connected"] and not run.link("h2")["left"], PATIENCE_S)
    with pytest.raises(OverlayError, match="so other cannot take the place of one"):
        run.host("other", comes_later=True).join(PATIENCE_S, ignore)
    run.close()


def test_of_two_that_want_one_place_the_slower_asks_for_another() -> None:
    asked, (joiner, reports) = list[str](), joiner_of("new")
    joiner.start = lambda: asked.append(joiner._hello.name)  # type: ignore[method-assign]
    joiner._failed(Rejected(Welcome(rejected="none", place="h1")))
    joiner._failed(Rejected(Welcome(rejected=TWICE, again=True)))
    assert (asked, joiner._hello.name) == (["h1"], "new")
    joiner._failed(Rejected(Welcome(rejected="none", place="h2")))
    assert asked == ["h1", "h2"]
    assert not reports


def test_a_port_that_is_taken_is_named_with_its_host(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        keys.new(tmp_path / "run.key")
        host = Overlay(
            Settings(
                name="h7",
                key_file=tmp_path / "run.key",
                needed=2,
                listen=("127.0.0.1", port),
                coordinator=None,
                patience_s=10,
            )
        )
        with pytest.raises(OverlayError) as failed:
            host.join(60, ignore)
        host.close()
    said = f"network.listen = 127.0.0.1:{port}, on h7: Address already in use; was the run started"
    assert str(failed.value).startswith(said)


def test_those_that_a_run_expects_and_that_did_not_come_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    with pytest.raises(OverlayError, match=r"only h0 did; missing: h1, h2$"):
        run.hosts[0].join(0.5, ignore, expected=["h0", "h1", "h2"])
    run.close()


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
def test_hosts_meet_over_ipv6(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, "::1")
    run.host("h1")
    run.join()
    addresses = {host.name: host.address for host in run.hosts[1].peer_list.hosts}
    assert addresses == {"h0": "", "h1": "::1"}
    run.close()


ASK = """
import sys
from thinpipe.launch.net.overlay.control import Client
client = Client(sys.argv[1])
client.ask("expose", port=int(sys.argv[2]))
client.ask("forward", host=1, port=int(sys.argv[2]), traffic="pipeline")
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_process_asked_for_ends_with_it(met: Run) -> None:
    here = met.hosts[0]
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


def test_why_a_host_was_rejected_keeps_its_name_on_the_wire() -> None:
    said = Welcome.model_validate_json('{"refused": "another run"}')
    assert said.rejected == "another run"
    ours, theirs = socket.socketpair()
    connection: Any = ours
    with ours, theirs:
        for _ in send(connection, said):
            pass
        assert b'"refused":"another run"' in theirs.recv(1000)
