"""Strangers at the port of a run, and networks that break: no loss changes.

Strangers sit on a host of their own, without the run's key.
"""

import contextlib
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from benchmarks.harness import format_table
from tests.faults.hosts import PORT, HostsRun, cut_off, pause, reset
from tests.launch.net.overlay.test_run import HOSTS, alone, start
from tests.shaped import shaped
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.net.overlay.links.handshake import Hello

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(0)]

TARGET = ("10.77.0.1", PORT)
_WAIT_S, _VISIT_S = 1.0, 3.0
_SETTLE_S = 7.0
"""Unproven connections are closed after 5 s."""
_LONG = (
    "train.epochs=99999",
    'train.decay="none"',
    "checkpoint.every_steps=99999",
    "eval.every_epochs=99999",  # steps alone are timed
)
"""Trains until it is killed."""


@pytest.fixture
def net() -> Iterator[ShapedNetwork]:
    with shaped(NetworkSpec.of(HOSTS + 1, "100mbit", delay="1ms")) as network:
        yield network


def table(run: HostsRun, heads: list[str], rows: Iterator[tuple[str, int, int, list[str]]]) -> None:
    """Rows, with the longest step between two steps; all losses are then those of one machine."""
    lines = []
    for kind, first, last, cells in rows:
        steps = [record.step_s for record in run.records()][first : last + 1]
        lines.append([kind, *cells, f"{max(steps, default=float('nan')):.2f}"])
    print(format_table([*heads, "longest step s"], lines))
    run.kill()
    losses = run.losses()
    epochs = run.records()[-1].epoch
    assert losses == alone(run.folder, f"train.epochs={epochs}", *_LONG[1:])[: len(losses)]


def test_strangers_change_nothing(net: ShapedNetwork, tmp_path: Path) -> None:
    """From before the start: all kinds in turn, then each by itself."""
    other = tmp_path / "other.key"
    keys.new(other)
    started = tmp_path / "started"
    knocking = threading.Thread(
        target=net.run, args=(lambda _: _knock(started, other),), kwargs={"hosts": [HOSTS]}
    )
    knocking.start()
    run = start(net, tmp_path, *_LONG)
    run.wait_for_step(3)
    started.touch()
    knocking.join()
    table(run, ["stranger", "tries", "rejected", "left over"], _visits(run, other))


def _visits(run: HostsRun, other: Path) -> Iterator[tuple[str, int, int, list[str]]]:
    for kind, attempt in _kinds(other, _record_member(run)).items():
        before, held, first = _rejected(run), run.relay(0).num_fds(), run.steps()
        tries = run.on(HOSTS, partial(_repeat, attempt))
        last = run.steps()
        time.sleep(_SETTLE_S)
        left = run.relay(0).num_fds() - held
        assert left <= 1, kind  # one is the question's own
        yield kind, first, last, [f"{tries:,}", f"{_rejected(run) - before:,}", str(left)]


def test_outages_change_nothing(net: ShapedNetwork, tmp_path: Path) -> None:
    run = start(net, tmp_path, *_LONG)
    run.wait_for_step(5)
    table(run, ["disturbance", "resumed"], _outages(run))


def _outages(run: HostsRun) -> Iterator[tuple[str, int, int, list[str]]]:
    def slower(slow: bool) -> None:
        run.net.set_rates("10mbit" if slow else "100mbit")

    cut = partial(cut_off, run)
    disturbances: dict[str, Callable[[], None]] = {
        "20 resets at random moments": partial(_resets, run),
        "host 2 cut off for 3 s": partial(pause, 3, partial(cut, 2)),
        "host 2 cut off for 10 s": partial(pause, 10, partial(cut, 2)),
        "host 2 cut off for 25 s": partial(pause, 25, partial(cut, 2)),
        "host 2 is heard but hears nothing, 5 s": partial(pause, 5, partial(cut, 2, ways="in")),
        "host 2 hears but is not heard, 5 s": partial(pause, 5, partial(cut, 2, ways="out")),
        "host 0, where all meet, cut off for 10 s": partial(pause, 10, partial(cut, 0)),
        "rate cut tenfold for 8 s": partial(pause, 8, slower),
    }
    for kind, disturb in disturbances.items():
        before, first = run.resumed(), run.steps()
        disturb()
        run.wait_for_step(run.steps() + 20)
        resumed = run.resumed() - before
        assert resumed or "rate" in kind
        yield kind, first, run.steps(), [str(resumed)]


def _resets(run: HostsRun) -> None:
    chance = random.Random(0)
    for _ in range(20):
        time.sleep(chance.uniform(0.1, 1.0))
        reset(run, chance.randrange(run.hosts))


def _knock(started: Path, other: Path) -> None:
    """All kinds in turn, without a pause, while a run starts."""
    _be_quiet()
    kinds = list(_kinds(other, b"").values())
    while not started.exists():
        for attempt in kinds:
            with contextlib.suppress(OSError, RuntimeError):
                attempt()


def _rejected(run: HostsRun) -> int:
    return sum(run.status(0)["rejected"].values())


def _repeat(attempt: Callable[[], int]) -> int:
    """How many tries there were in a few seconds."""
    _be_quiet()
    tries, limit_s = 0, time.monotonic() + _VISIT_S
    while time.monotonic() < limit_s:
        with contextlib.suppress(OSError, RuntimeError):
            tries += attempt()
    return tries


def _be_quiet() -> None:
    """torch's store client prints a stack with each rejection."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _kinds(other: Path, recorded: bytes) -> Mapping[str, Callable[[], int]]:
    noise = random.Random(0).randbytes(4000)
    foreign = keys.contexts(other)[1]
    bare, older = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))
    for context in (bare, older):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    older.load_cert_chain(other)
    return {
        "noise": partial(_say, noise),
        "HTTP": partial(_say, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        "half a TLS hello, then nothing": partial(_say, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"),
        "TLS 1.3 without a certificate": partial(_tls, bare),
        "TLS 1.3 with another run's key": partial(_tls, foreign),
        "TLS 1.2": partial(_tls, older),
        "a member's connection, replayed": partial(_say, recorded),
        "a client of torch's store": _store,
        "writes to a store's keys": partial(_say, _store_writes()),
        "a hello of gloo": partial(_say, struct.pack("<Q", 1) + bytes(64)),
        "half-open connections": _half_open,
        "10,000 connections": _crowd,
    }


def _say(words: bytes) -> int:
    with socket.create_connection(TARGET, _WAIT_S) as sock:
        sock.sendall(words)
        with contextlib.suppress(OSError):
            if sock.recv(4096):
                sock.recv(4096)
    return 1


def _hello() -> bytes:
    text = Hello(purpose="probe", name="host1").model_dump_json().encode()
    return struct.pack("!I", len(text)) + text


def _tls(context: ssl.SSLContext) -> int:
    sock = socket.create_connection(TARGET, _WAIT_S)
    with contextlib.suppress(OSError), context.wrap_socket(sock) as connection:
        connection.sendall(_hello())
        connection.recv(1)
    return 1


def _store() -> int:
    with contextlib.suppress(RuntimeError):
        TCPStore(*TARGET, None, False, timedelta(seconds=1), wait_for_workers=False)
    return 1


def _store_writes() -> bytes:
    """As torch's store client sends them: a validation, then SET for what a run has there."""
    words = struct.pack("<BI", 0, 0x3C85F7CE)
    for key in (b"/rendezvous/go/1", b"/failures/count", b"torch.rendezvous.thinpipe"):
        words += struct.pack("<BQ", 1, len(key)) + key + struct.pack("<Q", 8) + os.urandom(8)
    return words


def _half_open() -> int:
    """First packets of a connection, from addresses that never answer."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    with raw:
        for _ in range(200):
            source = f"10.77.0.{random.randrange(100, 250)}"
            raw.sendto(_syn(source), (TARGET[0], 0))
    return 200


def _syn(source: str) -> bytes:
    """An IPv4 packet with a TCP segment that asks for a connection."""
    ends = socket.inet_aton(source) + socket.inet_aton(TARGET[0])
    port = random.randrange(1024, 65535)
    segment = struct.pack("!HHIIBBHHH", port, PORT, 1, 0, 5 << 4, 2, 64240, 0, 0)
    check = _checksum(ends + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(segment)) + segment)
    segment = segment[:16] + struct.pack("!H", check) + segment[18:]
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(segment), 0, 0, 64, socket.IPPROTO_TCP, 0)
    return header + ends + segment


def _checksum(data: bytes) -> int:
    words: tuple[int, ...] = struct.unpack(f"!{len(data) // 2}H", data)
    total = sum(words)
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def _crowd() -> int:
    """Connect 10,000 times, and hold on to as many as possible."""
    held: list[socket.socket] = []
    for _ in range(10_000):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(TARGET)
        held.append(sock)
        if len(held) > 900:
            held.pop(0).close()
    time.sleep(_WAIT_S)
    for sock in held:
        sock.close()
    return 10_000


def _record_member(run: HostsRun) -> bytes:
    """What a member sends when it connects to host 0, byte by byte; it only looks in."""

    def connect() -> bytes:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = keys.contexts(run.key)[1].wrap_bio(incoming, outgoing)
        sent = b""
        with socket.create_connection(TARGET, _WAIT_S) as sock:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    sent += _flush(outgoing, sock)
                    incoming.write(sock.recv(65536))
            tls.write(_hello())
            sent += _flush(outgoing, sock)
            incoming.write(sock.recv(65536))
        return sent

    return run.on(1, connect)


def _flush(outgoing: ssl.MemoryBIO, sock: socket.socket) -> bytes:
    data = outgoing.read()
    sock.sendall(data)
    return data
