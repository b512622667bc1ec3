"""Real relays on one machine: how they come into a run, and whom they do not believe."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from tests import preload
from tests.commands import PATIENCE_S
from tests.launch.net.overlay.links.pair import Wire
from tests.launch.test_train import wait_until
from tests.ports import HAS_IPV6, free_port
from thinpipe.launch.host.interfaces import family_of
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.control import OverlayError
from thinpipe.launch.net.overlay.links.handshake import Hello, Welcome
from thinpipe.launch.net.overlay.process import Overlay
from thinpipe.launch.net.overlay.settings import Settings

pytestmark = pytest.mark.dist


class Run:
    """Hosts of one run; the first is where they meet."""

    def __init__(self, folder: Path, needed: int, address: str = "127.0.0.1") -> None:
        self.key, self.port, self._needed = folder / "run.key", free_port(), needed
        self._address = address
        keys.new(self.key)
        self.hosts = [self._host("h0", None, (address, self.port))]
        wait_until(self._listens, PATIENCE_S)

    def host(
        self, name: str, coordinator: tuple[str, int] | None = None, *, key: Path | None = None
    ) -> Overlay:
        where = coordinator or (self._address, self.port)
        self.hosts.append(self._host(name, where, (self._address, 0), key))
        return self.hosts[-1]

    def close(self) -> None:
        for host in self.hosts:
            host.close()

    def _listens(self) -> bool:
        with socket.socket(family_of(self._address)) as sock:
            return sock.connect_ex((self._address, self.port)) == 0

    def _host(
        self,
        name: str,
        coordinator: tuple[str, int] | None,
        listen: tuple[str, int],
        key: Path | None = None,
    ) -> Overlay:
        return Overlay(
            Settings(
                name=name,
                key_file=key or self.key,
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
    instances = {host.name: host.instance for host in one.peer_list.hosts}
    known = {"purpose": "link", "name": "h1", "to": "h0", "run": one.peer_list.run, "session": "x"}
    for wrong, reason in (
        ({"instance": instances["h1"], "attempt": 0}, "overtaken by a later connection"),
        ({"instance": "earlier", "attempt": 99}, "stale session"),
        ({"instance": instances["h1"], "attempt": 99, "run": "other"}, "another run"),
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
    assert [host.name for host in one.peer_list.hosts] == ["h0", "h1", "h2"]
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


def test_one_that_is_started_twice_is_refused_and_the_run_goes_on(run: Run) -> None:
    one, here = run.host("h1"), run.hosts[0]
    for host in (one, here):
        host.join(30, ignore)
    client = here.client()
    wait_until(lambda: client.ask("status")["links"]["h1"]["connected"], PATIENCE_S)
    again = Hello(purpose="join", name="h1", hosts=2, instance="another")
    assert "another machine is named 'h1', or this one was started twice" in say(run, again).refused
    itself = Hello(purpose="join", name="h0", hosts=2, instance="another")
    assert "another machine is named 'h0'" in say(run, itself).refused
    link = client.ask("status")["links"]["h1"]
    assert (link["connected"], link["resumed"], link["lost"]) == (True, 0, False)


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


def test_those_that_a_run_expects_and_that_did_not_come_are_named(run: Run) -> None:
    with pytest.raises(OverlayError, match=r"only h0 did; missing: h1, h2$"):
        run.hosts[0].join(2, ignore, expected=["h0", "h1", "h2"])


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
def test_hosts_meet_over_ipv6(tmp_path: Path) -> None:
    run = Run(tmp_path, 3, "::1")
    hosts = [*run.hosts, run.host("h1"), run.host("h2")]
    for host in hosts:
        host.join(60, ignore)
    addresses = {host.name: host.address for host in hosts[1].peer_list.hosts}
    assert addresses == {"h0": "", "h1": "::1", "h2": "::1"}
    clients = [host.client() for host in hosts]

    def connected() -> bool:
        links = [link for one in clients for link in one.ask("status")["links"].values()]
        return len(links) == 6 and all(link["connected"] for link in links)

    wait_until(connected, PATIENCE_S)
    run.close()


CLOCK = """
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += 86400 * atoi(getenv("DAYS"));
    return failed;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For LD_PRELOAD: a clock that is DAYS off."""
    return preload.build(CLOCK, tmp_path_factory.mktemp("clock"))


@pytest.mark.parametrize("days", [-9, 500])
def test_a_clock_by_which_the_key_is_not_valid_is_named(
    run: Run, clock: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(clock))
    monkeypatch.setenv("DAYS", str(days))
    late = run.host("h1")
    here = date.today()
    with pytest.raises(OverlayError, match="correct the clock") as failed:
        late.join(60, ignore)
    there = (here + timedelta(days), here + timedelta(days + 1))  # midnight may pass
    said = str(failed.value)
    assert any(f"the clock of h1 says {day}" in said for day in there), said
    assert f"{run.key}: valid from {here - timedelta(2)} to " in said


def test_a_clock_that_is_a_day_off_changes_nothing(
    run: Run, clock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(clock))
    monkeypatch.setenv("DAYS", "-1")
    run.host("h1").join(60, ignore)


@pytest.mark.parametrize("ended", ["h1", "h0"])
def test_a_key_that_has_expired_is_told_from_one_of_another_run(tmp_path: Path, ended: str) -> None:
    """Keys of single machines, one of which was valid until yesterday."""
    run = Run(tmp_path, 2)
    run.close()
    machine_keys = {name: tmp_path / f"{name}.key" for name in ("h0", "h1")}
    for name, path in machine_keys.items():
        keys.add(run.key, name, path, days=-1 if name == ended else 9)
    first = run._host("h0", None, ("127.0.0.1", run.port), machine_keys["h0"])
    wait_until(run._listens, PATIENCE_S)
    second = run.host("h1", key=machine_keys["h1"])
    said = SimpleQueue[str]()
    threads = [
        threading.Thread(target=_join, args=(host, said.put), daemon=True)
        for host in (first, second)
    ]
    for thread in threads:
        thread.start()
    while "correct the clocks" not in (text := said.get(timeout=PATIENCE_S)):
        assert "another run's" not in text
    for host in (first, second):
        host.close()
    for thread in threads:
        thread.join(PATIENCE_S)


def _join(host: Overlay, say: Callable[[str], None]) -> None:
    with contextlib.suppress(OverlayError):
        host.join(PATIENCE_S, say)


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
