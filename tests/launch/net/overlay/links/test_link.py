"""Local connections through a link: exact bytes whatever happens to the network between."""

import contextlib
import itertools
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.net.overlay.links.pair import PORT, Pair, Reset, noise, transfer
from tests.ports import free_port
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.links import dialer, link, loop, stream, tcp
from thinpipe.launch.net.overlay.links.frames import HEADER, Kind, Traffic
from thinpipe.launch.net.overlay.links.session import Session

RECORD_NBYTES = 5 + 1 + 16
"""What TLS adds to the bytes of a record."""
FULL = 1 << 14
"""Bytes that a record has at most."""
TOO_MUCH_NBYTES = 48 << 20
"""More than a small window and the kernel's buffers at both local connections hold."""


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "run.key"
    keys.new(path)
    return path


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link connects again without a pause."""
    monkeypatch.setattr(loop, "_TICK_S", 0.002)
    for pause in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(dialer, pause, 0.0)


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW_NBYTES", 1 << 20)


def test_both_directions_carry_exact_bytes_and_end_separately(key: Path) -> None:
    with Pair(key) as pair:
        near, far = pair.pipe()
        data = noise(3_000_001)
        assert transfer(near, far, data) == data
        assert transfer(far, near, data[::-1]) == data[::-1]  # after the other direction's end
        until(lambda: not (pair.a.streams or pair.b.streams))


class Sweep:
    """Resets connections one after the other: each later than the one before, in one direction.

    In the header of every record, before its last byte, and after it. `lengths` are the records';
    `resent` is how many frames had been sent again by then.
    """

    def __init__(self, up: bool, sender: Session) -> None:
        self.lengths, self.resent = list[int](), 0
        self._up, self._sender, self._places = up, sender, self._all_places()
        self._number, self._place = next(self._places)

    def __call__(self, up: bool, number: int, record: bytes) -> bytes:
        if up is not self._up or number < self._number:
            return record
        passing = record[: self._place % (len(record) + 1)]  # -1: all of it
        self.lengths.append(len(record))
        self.resent = self._sender.resent
        self._number, self._place = next(self._places)
        raise Reset(passing)

    @staticmethod
    def _all_places() -> Iterator[tuple[int, int]]:
        return ((number, place) for number in itertools.count() for place in (2, -2, -1))


@pytest.mark.parametrize(
    ("first", "up"),
    [
        (True, False),
        (False, True),
        *(pytest.param(first, first, marks=pytest.mark.slow) for first in (True, False)),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_a_reset_at_any_byte_loses_and_repeats_nothing(key: Path, first: bool, up: bool) -> None:
    """From the first byte of the handshake to where a frame has come, and its sender must not know.

    The stream's first connection is reset ("first"), for which it waits, also where it begins at
    the end to which connections come; or others that take its place ("later").
    """
    data, far = noise(40_000), None
    with Pair(key, held=True) as pair:
        sender, receiver = (pair.a, pair.b) if up else (pair.b, pair.a)
        near = pair.open(PORT, at=sender)
        if not first:
            pair.wire.held.clear()
            far = pair.accept()
            pair.wire.held.set()
            pair.wire.cut()
            until(lambda: not (pair.a.connected or pair.b.connected))
        pair.without_heartbeats()
        near.sendall(data)
        sweep = pair.wire.script = Sweep(up, sender.session)
        pair.wire.held.clear()
        far = far or pair.accept()
        assert _take(far, len(data)) == data
        until(lambda: not sender.session.unacknowledged_nbytes)  # told by another connection
        assert receiver.session.received == 2  # to open the stream, and its bytes
        assert sweep.lengths[-3:] == [RECORD_NBYTES + HEADER.size + len(data) - 2 * FULL] * 3
        assert sweep.lengths.count(RECORD_NBYTES + FULL) >= 3
        assert len(sweep.lengths) > 20  # with those of the handshake
        assert sender.session.resent == sweep.resent > 3  # what had come was not sent once more
        assert not [event for event in pair.events if event[1] == "lost"]


@pytest.mark.usefixtures("at_once")
def test_resets_amid_traffic_both_ways_lose_and_repeat_nothing(key: Path) -> None:
    data, every_nbytes = noise(2_000_000), {True: 500_000, False: 700_000}
    left, cuts = dict(every_nbytes), {True: 0, False: 0}

    def script(up: bool, number: int, record: bytes) -> bytes:
        left[up] -= len(record)
        if left[up] > 0:
            return record
        passing = record[: left[up] or None]
        left[up], cuts[up] = every_nbytes[up], cuts[up] + 1
        raise Reset(passing)

    with Pair(key) as pair:
        pipes = [pair.pipe() for _ in range(2)]
        pair.without_heartbeats()
        pair.wire.script = script
        with ThreadPoolExecutor(2) as pool:
            received = pool.map(transfer, *zip(pipes[0], pipes[1][::-1], strict=True), [data] * 2)
            assert list(received) == [data, data]
        assert all(cuts[up] >= len(data) // nbytes for up, nbytes in every_nbytes.items())
        assert pair.a.stats.resumed >= max(cuts.values())
        assert pair.a.session.resent > 0
        assert pair.b.session.resent > 0
        assert not [event for event in pair.events if event[1] == "lost"]


@pytest.mark.parametrize("damaged_up", [True, False], ids=["up", "down"])
@pytest.mark.usefixtures("at_once")
def test_no_changed_byte_is_ever_delivered(key: Path, damaged_up: bool) -> None:
    """Of every connection one byte is changed, where it has carried half a megabyte."""
    data, changed = noise(4_000_000), 0

    def damage(up: bool, number: int, record: bytes) -> bytes:
        nonlocal changed
        if up is not damaged_up or number != 40:
            return record
        end = len(record)  # whose length stays, as more of it would be waited for
        places = [0, 1, 5, end // 3, end // 2, end - 1]
        place, wrong = places[changed % len(places)], 1 << changed % 8
        changed += 1
        return record[:place] + bytes([record[place] ^ wrong]) + record[place + 1 :]

    with Pair(key) as pair:
        ends = pair.pipe()
        pair.wire.script = damage
        assert transfer(*(ends if damaged_up else ends[::-1]), data) == data
    assert changed >= len(data) // (40 * FULL)
    assert pair.wire.connections > changed


def test_urgent_bytes_overtake_a_full_link(key: Path) -> None:
    """What is urgent waits for what the kernel has, not for the ten megabytes before it."""
    nbytes = 10_000_000
    with Pair(key) as pair:
        (bulk, bulk_far), (ping, ping_far) = pair.pipe(Traffic.EXCHANGE), pair.pipe(Traffic.CONTROL)
        pair.without_heartbeats()
        start, passed, overtaken = pair.b.stats.received_nbytes, 0, 0

        def script(up: bool, number: int, record: bytes) -> bytes:
            """Until the urgent bytes come, a record passes when the one before it was read."""
            nonlocal passed, overtaken
            if up and not overtaken:
                until(lambda: pair.b.stats.received_nbytes - start == passed)
                if select.select([ping_far], [], [], 0)[0]:
                    overtaken = passed
                passed += len(record) - RECORD_NBYTES
            return record

        pair.wire.held.set()
        pair.wire.script = script
        with ThreadPoolExecutor(2) as pool:
            sent = pool.submit(bulk.sendall, bytes(nbytes))
            until(lambda: pair.a.stats.sent_nbytes > 100_000)
            ping.sendall(b"urgent")
            pair.call(lambda: None)  # the link has seen it
            pair.wire.held.clear()
            assert _take(bulk_far, nbytes) == bytes(nbytes)
            sent.result()
        assert ping_far.recv(6) == b"urgent"
        assert 0 < overtaken < nbytes / 2


def test_a_newcomers_state_waits_for_room_on_the_path(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an exchange as much is sent as the kernel takes."""
    nbytes, under_way = 3_000_000, [1 << 30]
    monkeypatch.setattr(
        link,
        "read_state",
        lambda sock: replace(tcp.read_state(sock), under_way_nbytes=under_way[0]),
    )
    with Pair(key) as pair, ThreadPoolExecutor(2) as pool:
        (state, state_far), (other, other_far) = pair.pipe(Traffic.JOINING), pair.pipe()
        before = pair.a.stats.sent_nbytes
        pool.submit(state.sendall, bytes(nbytes))
        pool.submit(other.sendall, bytes(nbytes))
        assert _take(other_far, nbytes) == bytes(nbytes)
        assert pair.a.stats.sent_nbytes - before < 1.5 * nbytes
        assert not select.select([state_far], [], [], 0)[0]
        under_way[0] = 0
        assert _take(state_far, nbytes) == bytes(nbytes)


def _take(sock: socket.socket, nbytes: int) -> bytes:
    with sock.makefile("rb") as file:
        return file.read(nbytes)


@pytest.mark.usefixtures("small_window")
def test_a_reader_that_stops_holds_its_writer_up(key: Path) -> None:
    with Pair(key) as pair:
        near, far = pair.pipe()
        begun, sent = next(iter(pair.a.streams.values())), 0
        near.settimeout(0.2)
        while sent < TOO_MUCH_NBYTES:
            try:
                sent += near.send(bytes(1 << 20))
            except TimeoutError:
                if not begun._may_send:
                    break
        assert stream.WINDOW_NBYTES <= sent < TOO_MUCH_NBYTES
        near.settimeout(PATIENCE_S)
        other_near, other_far = pair.pipe()  # and nobody else
        other_near.sendall(b"on")
        assert other_far.recv(2) == b"on"
        _take(far, sent)


def test_a_connection_to_what_is_not_exposed_is_closed(key: Path) -> None:
    with Pair(key) as pair:
        assert pair.open(22).recv(1) == b""


def test_silence_is_named_and_healed(key: Path) -> None:
    with Pair(key) as pair:
        near, far = pair.pipe()
        pair.wire.held.set()
        near.sendall(b"waits")
        until(lambda: len(pair.events) == 2)
        states = {(peer, state) for peer, state, _ in pair.events}
        assert states == {("a", "silent"), ("b", "silent")}
        pair.wire.held.clear()
        assert far.recv(5) == b"waits"
        assert ("b", "back", "") in pair.events


def test_after_its_patience_a_link_breaks_its_streams_and_can_begin_anew(key: Path) -> None:
    with Pair(key, patience_s=3) as pair:
        near, _far = pair.pipe()
        pair.wire.held.set()
        start_s = time.monotonic() - pair.a.silence_s
        assert near.recv(1) == b""
        assert time.monotonic() - start_s >= 3
        assert "lost" in {state for _, state, _ in pair.events}
        waiting = pair.open(PORT)  # for one more time
        waiting.sendall(b"again")
        pair.wire.held.clear()
        assert pair.accept().recv(5) == b"again"


def test_a_machine_without_its_relay_is_given_up_at_once(key: Path) -> None:
    with Pair(key, patience_s=3600) as pair:
        near, _ = pair.pipe()
        pair.wire.close()  # as when the process was killed: connections end, and new ones fail
        assert near.recv(1) == b""
        assert "its relay has ended: that machine refuses connections" in pair.events[-1]


def test_a_host_that_leaves_in_order_is_not_missed(key: Path) -> None:
    with Pair(key) as pair:
        near, _far = pair.pipe()
        pair.call(lambda: pair.b.say(Kind.BYE))
        until(lambda: pair.a.has_left)
        pair.wire.cut()
        assert near.recv(1) == b""  # who waits for it learns at once
        attempts = pair.attempts
        for _ in range(5):  # rounds in which it would have connected
            pair.call(lambda: None)
        assert pair.attempts == attempts
        assert [event for event in pair.events if event[0] == "b"] == [("b", "left", "")]


@pytest.mark.usefixtures("small_window")
@pytest.mark.parametrize(
    ("later", "opens"),
    [(1, b"\0\7"), (0, b"\0\7"), (100, b"\0\7\0"), (0, b"")],
    ids=["foreign stream", "second open", "long open", "too much"],
)
def test_a_peer_that_breaks_the_rules_is_given_up(key: Path, later: int, opens: bytes) -> None:
    """A member of the run with another program, or a defect."""
    with Pair(key) as pair:
        near, _far = pair.pipe()
        begun = next(iter(pair.a.streams.values()))

        def break_rules() -> None:
            begun.number += later
            pair.a.post(Kind.OPEN, begun, opens) if opens else begun.credit(1 << 40)

        pair.call(break_rules)
        if not opens:
            with contextlib.suppress(OSError):
                near.sendall(bytes(TOO_MUCH_NBYTES))
        until(lambda: any(state == "lost" for _, state, _ in pair.events))


def test_who_was_given_up_is_not_given_up_again_as_another_has_its_name(key: Path) -> None:
    with Pair(key) as pair:

        def twice() -> None:
            pair.a.give_up("gone")
            pair.a.give_up("another has its name")

        pair.call(twice)
        until(lambda: any(state == "lost" for _, state, _ in pair.events))
        reasons = [reason for _, state, reason in pair.events if state == "lost"]
        assert "gone" in reasons
        assert "another has its name" not in reasons


def test_a_refusal_means_nothing_where_the_peer_never_was(
    key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else may refuse there, as a router in front of it does."""
    monkeypatch.setattr(dialer, "_REFUSED_S", 0.0)  # elsewhere the second one would be the end
    with Pair(key) as pair:
        near, far = pair.pipe()
        address, pair.wire.address = pair.wire.address, ("127.0.0.1", free_port())
        attempts, note = pair.attempts, dialer.Dialer._note_refusal

        def note_late(*arguments: Any, **options: Any) -> None:
            """The peer's address is its own again while an attempt elsewhere is refused."""
            if pair.attempts >= attempts + 4:
                pair.wire.address = address
            note(*arguments, **options)

        monkeypatch.setattr(dialer.Dialer, "_note_refusal", note_late)
        pair.wire.cut()
        assert transfer(near, far, b"on") == b"on"
        assert not any(state == "lost" for _, state, _ in pair.events)
