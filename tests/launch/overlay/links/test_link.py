"""Local connections through a link: exact bytes whatever happens to the network between."""

import contextlib
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.launch.overlay.links.pair import PORT, Pair, noise, transfer
from thinpipe.launch.overlay import keys
from thinpipe.launch.overlay.links import link as link_module
from thinpipe.launch.overlay.links.frames import Kind, Traffic
from thinpipe.launch.overlay.links.stream import WINDOW_NBYTES


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "run.key"
    keys.new(path)
    return path


def test_both_directions_carry_exact_bytes_and_end_separately(key: Path) -> None:
    with Pair(key) as pair:
        near, far = pair.pipe()
        data = noise(3_000_001)
        assert transfer(near, far, data) == data
        assert transfer(far, near, data[::-1]) == data[::-1]  # after the other direction's end
        deadline = time.monotonic() + 10
        while pair.a.streams or pair.b.streams:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_resets_at_any_moment_lose_and_repeat_nothing(key: Path) -> None:
    random_ = random.Random(5)
    with Pair(key) as pair:
        pipes, data = [pair.pipe() for _ in range(2)], noise(20_000_000)
        received = [b"", b""]

        def run(number: int) -> None:
            ends = pipes[number]
            received[number] = transfer(*(ends if number else ends[::-1]), data)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(random_.uniform(0.01, 0.15))
            pair.wire.cut()
        assert received == [data, data]
        assert pair.wire.connections > 2
        assert pair.a.stats.resumed > 0
    assert not [event for event in pair.events if event[1] == "lost"]


def test_no_changed_byte_is_ever_delivered(key: Path) -> None:
    random_, changed = random.Random(9), 0
    with Pair(key) as pair:
        near, far = pair.pipe()
        data = noise(8_000_000)

        def damage(passing: bytes) -> bytes:
            nonlocal changed
            if random_.random() > 0.02:
                return passing
            changed += 1
            place = random_.randrange(len(passing))
            wrong = passing[place] ^ random_.randrange(1, 256)
            return passing[:place] + bytes([wrong]) + passing[place + 1 :]

        pair.wire.damage = damage
        assert transfer(near, far, data) == data
    assert changed > 3
    assert pair.wire.connections > 3


def test_urgent_bytes_overtake_a_full_link(key: Path) -> None:
    """A megabyte waits at 20 MB/s; what is urgent does not wait for it."""
    with Pair(key) as pair:
        (bulk, bulk_far), (ping, ping_far) = pair.pipe(Traffic.EXCHANGE), pair.pipe(Traffic.CONTROL)

        def slow(data: bytes) -> bytes:
            time.sleep(len(data) / 20e6)
            return data

        pair.wire.damage = slow
        nbytes = 10_000_000
        thread = threading.Thread(target=bulk.sendall, args=(bytes(nbytes),), daemon=True)
        sink = threading.Thread(target=_take, args=(bulk_far, nbytes), daemon=True)
        thread.start()
        sink.start()
        time.sleep(0.1)
        start_s = time.monotonic()
        ping.sendall(b"urgent")
        assert ping_far.recv(6) == b"urgent"
        urgent_s = time.monotonic() - start_s
        sink.join(60)
        assert urgent_s < (time.monotonic() - start_s) / 2


def _take(sock: socket.socket, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(sock.recv(min(nbytes, 1 << 20)))


def test_a_reader_that_stops_holds_its_writer_up(key: Path) -> None:
    with Pair(key) as pair:
        near, far = pair.pipe()
        near.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 4 * WINDOW_NBYTES:
                sent += near.send(bytes(1 << 20))
        buffers = 16 << 20  # of the kernel, at both local connections
        assert sent <= WINDOW_NBYTES + buffers
        near.settimeout(60)
        other_near, other_far = pair.pipe()  # and nobody else
        other_near.sendall(b"on")
        assert other_far.recv(2) == b"on"
        _take(far, sent)


def test_a_connection_to_what_is_not_exposed_is_closed(key: Path) -> None:
    with Pair(key) as pair:
        assert pair.open(22).recv(1) == b""


def test_the_end_of_a_process_is_noticed_at_the_other_end(key: Path) -> None:
    with Pair(key) as pair:
        near, far = pair.pipe()
        near.sendall(b"last words")
        near.close()
        assert b"".join(iter(lambda: far.recv(100), b"")) == b"last words"


def test_silence_is_named_and_healed(key: Path) -> None:
    with Pair(key) as pair:
        near, far = pair.pipe()
        pair.wire.held.set()
        near.sendall(b"waits")
        time.sleep(link_module.SILENT_S + 1.5)
        states = {(peer, state) for peer, state, _ in pair.events}
        assert states == {("a", "silent"), ("b", "silent")}
        pair.wire.held.clear()
        assert far.recv(5) == b"waits"
        assert ("b", "back", "") in pair.events


def test_after_its_patience_a_link_breaks_its_streams_and_can_begin_anew(key: Path) -> None:
    with Pair(key, patience_s=3) as pair:
        near, _far = pair.pipe()
        pair.wire.held.set()
        start_s = time.monotonic()
        near.settimeout(60)
        assert near.recv(1) == b""
        assert 3 <= time.monotonic() - start_s < 30
        assert "lost" in {state for _, state, _ in pair.events}
        waiting = pair.open(PORT)  # for one more time
        waiting.sendall(b"again")
        pair.wire.held.clear()
        assert pair.accept().recv(5) == b"again"


def test_a_machine_without_its_carrier_is_given_up_at_once(key: Path) -> None:
    with Pair(key) as pair:
        near, _ = pair.pipe()
        begin_s = time.monotonic()
        pair.wire.close()  # as when the process was killed: connections end, and new ones fail
        assert near.recv(1) == b""
        assert time.monotonic() - begin_s < 10
        assert "its carrier has ended: that machine refuses connections" in pair.events[-1]


def test_a_host_that_leaves_in_order_is_not_missed(key: Path) -> None:
    with Pair(key) as pair:
        near, _far = pair.pipe()
        pair.call(pair.b.say_goodbye)
        deadline_s = time.monotonic() + 20
        while not pair.a.has_left:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        connections = pair.wire.connections
        pair.wire.cut()
        assert near.recv(1) == b""  # who waits for it learns at once
        time.sleep(1)
        assert pair.wire.connections == connections
        assert [event for event in pair.events if event[0] == "b"] == [("b", "left", "")]


@pytest.mark.parametrize("what", ["foreign stream", "second open", "too much", "long open"])
def test_a_peer_that_breaks_the_rules_is_given_up(key: Path, what: str) -> None:
    """A member of the run with another program, or a defect."""
    with Pair(key) as pair:
        near, _far = pair.pipe()
        stream = next(iter(pair.a.streams.values()))

        def break_rules() -> None:
            if what == "foreign stream":
                stream.number += 1
                pair.a.post(Kind.OPEN, stream, b"\0\7")
            elif what == "second open":
                pair.a.post(Kind.OPEN, stream, b"\0\7")
            elif what == "long open":
                stream.number += 100
                pair.a.post(Kind.OPEN, stream, b"\0\7\0")
            else:
                stream.credit(1 << 40)

        pair.call(break_rules)
        if what == "too much":
            with contextlib.suppress(OSError):
                near.sendall(bytes(4 * WINDOW_NBYTES))
        deadline_s = time.monotonic() + 20
        while not any(state == "lost" for _, state, _ in pair.events):
            assert time.monotonic() < deadline_s, pair.events
            time.sleep(0.05)


def test_a_refusal_means_nothing_where_the_peer_never_was(key: Path) -> None:
    """Something else may refuse there, as a router in front of it does."""
    with Pair(key) as pair:
        near, far = pair.pipe()
        with socket.create_server(("127.0.0.1", 0)) as unused:
            elsewhere = unused.getsockname()
        address, pair.wire.address = pair.wire.address, elsewhere
        pair.wire.cut()
        time.sleep(3)
        pair.wire.address = address
        assert transfer(near, far, b"on") == b"on"
        assert not any(state == "lost" for _, state, _ in pair.events)


def test_streams_that_wait_for_the_first_connection_are_carried(key: Path) -> None:
    """Also those that begin at the end to which connections come."""
    with Pair(key) as pair:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname(), timeout=60)
            inside = server.accept()[0]
        address = pair.wire.address
        pair.wire.address = "127.0.0.1", 1  # nobody is there
        pair.wire.cut()
        time.sleep(0.5)
        for link in (pair.a, pair.b):
            pair.call(link.restart)
        pair.call(lambda: pair.b.open(inside, PORT, Traffic.PIPELINE))
        near.sendall(b"early")
        pair.wire.address = address
        far = pair.accept()
        assert far.recv(5) == b"early"
        near.close()
