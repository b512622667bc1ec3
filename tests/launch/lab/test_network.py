"""Real traffic through real namespaces; skipped where they are not allowed."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch.lab.kernel import class_bps, uplink_bps
from thinpipe.launch.lab import ranks
from thinpipe.launch.lab.network import HostError, ShapedNetwork
from thinpipe.launch.lab.probe import probe_link
from thinpipe.launch.lab.spec import NetworkSpec

PORT = 5300
TIMEOUT_S = 120
BURST_NBYTES = 30_000
"""At least what a token bucket lets through at once."""
LONG_S = 600
"""Longer than any test takes."""

pytestmark = pytest.mark.usefixtures("namespaces")


def transfer_s(
    net: ShapedNetwork, source: int, *targets: int, nbytes: int = 1_000_000
) -> list[float]:
    """Seconds from the first byte sent to the last one received, for each target.

    However busy the machine is, a link cannot be faster than its rate.
    """

    def job(host: int) -> float:
        if host != source:
            return _receive(nbytes)
        begin_s = time.monotonic()
        with ThreadPoolExecutor(len(targets)) as pool:
            list(pool.map(lambda target: _send(target, nbytes), targets))
        return begin_s

    begin_s, *ends_s = net.run(job, hosts=(source, *targets), timeout_s=TIMEOUT_S)
    return [end_s - begin_s for end_s in ends_s]


def least_s(nbytes: float, bps: float) -> float:
    """What a link of that rate takes at least; a token bucket lets a burst through at once."""
    return 8 * (nbytes - BURST_NBYTES) / bps


def _send(target: int, nbytes: int) -> None:
    with _connect(target) as link:
        link.sendall(bytes(nbytes))


def _connect(target: int) -> socket.socket:
    limit_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return socket.create_connection((f"host{target}", PORT), timeout=TIMEOUT_S)
        except ConnectionRefusedError:
            assert time.monotonic() < limit_s
            time.sleep(0.01)


def _accept(buffer_nbytes: int | None = None) -> socket.socket:
    with socket.create_server(("", PORT)) as server:
        if buffer_nbytes is not None:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_nbytes)
        server.settimeout(TIMEOUT_S)
        return server.accept()[0]


def _receive(nbytes: int) -> float:
    """Receive that many bytes; return when the last one arrived."""
    with _accept() as link:
        return _read(link, nbytes)


def _read(link: socket.socket, nbytes: int) -> float:
    while nbytes > 0:
        received = len(link.recv(min(nbytes, 1 << 16)))
        assert received > 0
        nbytes -= received
    return time.monotonic()


def test_up_and_downlinks_have_their_own_limits(net: ShapedNetwork) -> None:
    net.set_rates(up="40mbit,80mbit,80mbit", down="80mbit,80mbit,20mbit")
    assert net.run(uplink_bps) == [40e6, 80e6, 80e6]
    for source, target, bps in ((0, 1, 40e6), (1, 0, 80e6), (1, 2, 20e6)):
        (seconds,) = transfer_s(net, source, target)
        assert seconds > least_s(1e6, bps)


def test_a_pair_has_its_own_rate_within_that_of_its_hosts(net: ShapedNetwork) -> None:
    net.set_rates("50mbit", pairs=["0,1=40mbit"])
    try:
        assert net.run(class_bps, hosts=[0]) == [[40e6, 50e6, 50e6]]  # pair, others, sum
        to_pair_s, to_other_s = transfer_s(net, 0, 1, 2)
    finally:
        net.set_rates("none", pairs=["0,1=none"])
    assert to_pair_s > least_s(1e6, 40e6)
    assert max(to_pair_s, to_other_s) > least_s(2e6, 50e6)


def test_rates_change_while_traffic_flows(net: ShapedNetwork) -> None:
    nbytes, buffer_nbytes = 2_000_000, 1 << 16

    def job(host: int) -> float:
        if host == 0:
            _send(1, nbytes)
            return 0.0
        with _accept(buffer_nbytes) as link:
            _read(link, nbytes // 2)
            net.set_rates("20mbit")  # from inside a host
            begin_s = time.monotonic()
            return _read(link, nbytes // 2) - begin_s

    net.set_rates("100mbit")
    _, seconds = net.run(job, hosts=(0, 1), timeout_s=TIMEOUT_S)
    assert net.run(uplink_bps) == [20e6] * 3
    assert seconds > least_s(nbytes / 2 - 4 * buffer_nbytes, 20e6)  # less what had arrived before


@pytest.mark.slow
def test_a_probe_measures_at_most_the_rate(net: ShapedNetwork) -> None:
    net.set_rates("20mbit")
    found = probe_link(net, 0, 1)
    assert (found.nominal_bps, found.nominal_round_trip_s) == (20e6, 0.0)
    assert 0 < found.achieved_bps < 1.1 * 20e6


@pytest.mark.slow
def test_delays_hold_per_direction_and_rates_with_them(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text('{"latency_s": [[0, 0.01, 0.02], [0.01, 0, 0], [0.04, 0, 0]]}')
    with ShapedNetwork(NetworkSpec.of(rate="50mbit", matrix=path)) as net:
        for link, round_trip_s in (((0, 1), 0.02), ((0, 2), 0.06), ((1, 2), 0.0)):
            found = probe_link(net, *link)
            assert found.nominal_round_trip_s == round_trip_s
            assert round_trip_s <= found.round_trip_s < round_trip_s + 1
            assert found.achieved_bps < 1.1 * 50e6
        delays = [_one_way_s(net, *link) for link in ((0, 2), (2, 0))]
    assert delays[0] >= 0.02
    assert delays[1] >= 0.04


def _one_way_s(net: ShapedNetwork, source: int, target: int) -> float:
    def job(host: int) -> float:
        if host == source:
            with _connect(target) as link:
                link.sendall(str(sent_s := time.monotonic()).encode())
                return sent_s
        return _receive(1)

    sent_s, received_s = net.run(job, hosts=(source, target), timeout_s=TIMEOUT_S)
    return received_s - sent_s


def test_host_names_resolve_without_a_name_server(net: ShapedNetwork) -> None:
    def job(_: int) -> tuple[str, str, float]:
        begin = time.perf_counter()
        address = socket.gethostbyname("host2")
        with pytest.raises(socket.gaierror):
            socket.gethostbyname("elsewhere.example")
        return socket.gethostname(), address, time.perf_counter() - begin

    names, addresses, seconds = zip(*net.run(job), strict=True)
    assert names == ("host0", "host1", "host2")
    assert set(addresses) == {"10.77.0.3"}
    assert max(seconds) < 3, "waited for a name server"


def test_hosts_have_only_their_own_link(net: ShapedNetwork) -> None:
    found = net.run(lambda _: sorted(name for _, name in socket.if_nameindex()))
    assert found == [["eth0", "lo"]] * 3


def test_results_are_returned_and_nothing_is_imported_again(net: ShapedNetwork) -> None:
    marker = object()
    assert net.run(lambda host: (host * 2, id(marker))) == [(h * 2, id(marker)) for h in range(3)]


@pytest.mark.slow
def test_two_networks_are_independent() -> None:
    with (
        ShapedNetwork(NetworkSpec.of(2, "10mbit")) as slow,
        ShapedNetwork(NetworkSpec.of(2, "40mbit")) as fast,
        ThreadPoolExecutor(2) as pool,
    ):
        for net, bps in ((slow, 10e6), (fast, 40e6)):
            assert net.run(uplink_bps) == [bps] * 2
        jobs = [pool.submit(transfer_s, net, 0, 1) for net in (slow, fast)]
        for job, bps in zip(jobs, (10e6, 40e6), strict=True):
            assert job.result()[0] > least_s(1e6, bps)


def _fail_on_1(host: int) -> None:
    if host == 1:
        raise KeyError("nothing here")
    time.sleep(LONG_S)


def _die_on_1(host: int) -> None:
    if host == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG_S)


def _exit_on_1(host: int) -> None:
    sys.exit("enough") if host == 1 else time.sleep(LONG_S)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_fail_on_1, "host1:\n.*KeyError: 'nothing here'"),
        (_die_on_1, "host1 was killed by signal 9"),
        (_exit_on_1, "host1:\n.*SystemExit: enough"),
    ],
)
def test_a_failing_host_stops_the_others(
    net: ShapedNetwork, function: Callable[[int], None], message: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(HostError, match=f"(?s){message}"):
        net.run(function)
    assert time.monotonic() - begin < LONG_S / 10


@pytest.mark.slow
def test_a_process_that_gets_sigterm_while_it_is_forked_ends(
    net: ShapedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked process loses signals until its interpreter is ready."""
    fork, test, started = os.fork, os.getpid(), 0

    def slow_fork() -> int:
        nonlocal started
        outside, pid = os.getpid() == test, fork()
        if outside:
            started += pid > 0
        elif pid == 0 and started != 1:
            ignored = signal.signal(signal.SIGTERM, lambda *_: None)
            time.sleep(3)
            signal.signal(signal.SIGTERM, ignored)
        return pid

    monkeypatch.setattr(os, "fork", slow_fork)
    monkeypatch.setattr(ranks, "GRACE_S", LONG_S)  # SIGTERM must suffice
    begin = time.monotonic()
    with pytest.raises(HostError, match="host1 was killed"):
        net.run(_die_on_1)
    assert time.monotonic() - begin < LONG_S / 10


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_stopped(net: ShapedNetwork) -> None:
    with pytest.raises(TimeoutError, match=r"hosts \[0, 2\] still run after 3 s"):
        net.run(lambda host: time.sleep(0 if host == 1 else LONG_S), timeout_s=3)
    assert net.run(lambda host: host) == [0, 1, 2]


def test_an_invalid_change_changes_nothing(net: ShapedNetwork) -> None:
    before = net.spec
    with pytest.raises(ValueError, match="--rate = 'fast'"):
        net.set_rates("fast")
    assert net.spec == before


def test_invalid_messages_of_a_client_are_harmless(net: ShapedNetwork) -> None:
    for message in (b"nonsense", b"[]", b'{"rate": 5}', b'{"pairs": [1]}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(f"\0thinpipe-shaped-{net.run_id}")
            client.send(message)
            assert b"error" in client.recv(1000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"\0thinpipe-shaped-{net.run_id}")
    assert net.run(lambda host: host) == [0, 1, 2]
