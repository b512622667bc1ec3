"""Real traffic through real namespaces; skipped, with the reason, where they are not allowed."""

import errno
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from thinpipe.launch.host.links import NetworkSpec
from thinpipe.launch.host.tcp_probe import payload_bps
from thinpipe.launch.shaped import requirements
from thinpipe.launch.shaped.network import HostError, ShapedNetwork
from thinpipe.launch.shaped.probe import probe_link
from thinpipe.launch.shaped.ranks import GRACE_S
from thinpipe.launch.shaped.shaping import Shape, Shaper

PORT = 5300


pytestmark = pytest.mark.usefixtures("namespaces")


def settles(measure: Callable[[], float], low: float, high: float) -> bool:
    """Within bounds at one of several tries, as a busy machine adds delays of its own."""
    return any(low < measure() < high for _ in range(6))


def keeps_rate(net: ShapedNetwork, source: int, target: int, bps: float) -> bool:
    """Within 10 % of `bps`; no try may exceed it."""

    def achieved_bps() -> float:
        found = probe_link(net, source, target).achieved_bps
        assert found < 1.1 * bps
        return found

    return settles(achieved_bps, 0.9 * bps, 1.1 * bps)


@pytest.mark.parametrize("mbit", [10, 100])
def test_a_link_achieves_its_rate(net: ShapedNetwork, mbit: int) -> None:
    net.set_rates(f"{mbit}mbit")
    assert keeps_rate(net, 0, 1, mbit * 1e6)


def test_up_and_downlinks_are_limited_each_on_its_own(net: ShapedNetwork) -> None:
    net.set_rates(up="40mbit,80mbit,80mbit", down="80mbit,80mbit,20mbit")
    assert keeps_rate(net, 0, 1, 40e6)
    assert keeps_rate(net, 1, 0, 80e6)
    assert keeps_rate(net, 1, 2, 20e6)


def test_a_pair_has_its_own_rate_within_the_hosts(net: ShapedNetwork) -> None:
    net.set_rates("50mbit", pairs=["0,1=40mbit"])
    all_flow = multiprocessing.get_context("fork").Barrier(2)

    def job(host: int) -> float:
        if host == 0:
            _flood("host1", "host2")
            return 0.0
        with _accept() as link:
            all_flow.wait(60)
            return payload_bps(link, warm_up_s=0.5, window_s=1.0)

    def both_bps() -> float:
        _, to_pair, to_other = net.run(job, timeout_s=90)
        assert to_pair < 40e6
        return to_pair + to_other if to_pair > 10e6 else 0.0

    try:
        assert keeps_rate(net, 0, 1, 40e6)
        assert settles(both_bps, 35e6, 52e6)
    finally:
        net.set_rates("none", pairs=["0,1=none"])


def test_rates_change_while_traffic_flows(net: ShapedNetwork) -> None:
    def job(host: int) -> tuple[float, float]:
        if host == 0:
            _flood("host1")
            return 0.0, 0.0
        with _accept() as link:
            before = payload_bps(link, warm_up_s=0.2, window_s=0.5)
            net.set_rates("20mbit")  # from inside a host
            return before, payload_bps(link, warm_up_s=0.3, window_s=0.5)

    def slower_bps() -> float:
        net.set_rates("100mbit")
        before, after = net.run(job, hosts=(0, 1), timeout_s=90)[1]
        assert before < 102e6
        assert after < 21e6
        return after if before > 50e6 else 0.0

    assert settles(slower_bps, 10e6, 21e6)


def _flood(*targets: str) -> None:
    """Send to all at once until they close."""
    with ThreadPoolExecutor(len(targets)) as pool:
        list(pool.map(_flood_one, targets))


def _flood_one(target: str) -> None:
    limit = time.monotonic() + 60
    while True:
        try:
            link = socket.create_connection((target, PORT), timeout=60)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < limit
            time.sleep(0.01)
    with link:
        try:
            while True:
                link.sendall(bytes(1 << 16))
        except (ConnectionResetError, BrokenPipeError):
            return


def _accept() -> socket.socket:
    with socket.create_server(("", PORT)) as server:
        server.settimeout(60)
        return server.accept()[0]


def test_delays_hold_per_direction_and_rates_with_them(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text('{"latency_s": [[0, 0.01, 0.02], [0.01, 0, 0], [0.04, 0, 0]]}')
    with ShapedNetwork(NetworkSpec.of(rate="50mbit", matrix=path)) as net:
        for link, round_trip_s in (((0, 1), 0.02), ((0, 2), 0.06), ((1, 2), 0.0)):
            assert settles(lambda: _extra_s(net, link, round_trip_s), -1e-9, 0.006)  # noqa: B023
        assert keeps_rate(net, 0, 1, 50e6)


def _extra_s(net: ShapedNetwork, link: tuple[int, int], round_trip_s: float) -> float:
    extra_s = probe_link(net, *link).round_trip_s - round_trip_s
    assert extra_s >= 0
    return extra_s


def test_hosts_have_names_that_resolve_at_once(net: ShapedNetwork) -> None:
    def job(_: int) -> tuple[str, str, float]:
        begin = time.perf_counter()
        address = socket.gethostbyname("host2")
        with pytest.raises(socket.gaierror):
            socket.gethostbyname("elsewhere.example")
        return socket.gethostname(), address, time.perf_counter() - begin

    names, addresses, seconds = zip(*net.run(job), strict=True)
    assert names == ("host0", "host1", "host2")
    assert set(addresses) == {"10.77.0.3"}
    assert max(seconds) < 3, "a name server was asked, and did not answer"


def test_hosts_see_only_their_own_link(net: ShapedNetwork) -> None:
    interfaces = net.run(lambda _: sorted(name for _, name in socket.if_nameindex()))
    assert all(names == ["eth0", "lo"] for names in interfaces)


def test_results_come_back_and_nothing_is_imported_again(net: ShapedNetwork) -> None:
    marker = object()
    assert net.run(lambda host: (host * 2, id(marker))) == [(h * 2, id(marker)) for h in range(3)]


def test_two_networks_at_once_keep_apart() -> None:
    with (
        ShapedNetwork(NetworkSpec.of(2, "10mbit")) as slow,
        ShapedNetwork(NetworkSpec.of(2, "40mbit")) as fast,
        ThreadPoolExecutor(2) as pool,
    ):
        jobs = [pool.submit(keeps_rate, n, 0, 1, bps) for n, bps in ((slow, 10e6), (fast, 40e6))]
        assert all(job.result() for job in jobs)


def _fail_on_1(host: int) -> None:
    if host == 1:
        raise KeyError("nothing here")
    time.sleep(60)


def _die_on_1(host: int) -> None:
    if host == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _exit_on_1(host: int) -> None:
    sys.exit("enough") if host == 1 else time.sleep(60)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_fail_on_1, "host1:\n.*KeyError: 'nothing here'"),
        (_die_on_1, "host1 was killed by signal 9"),
        (_exit_on_1, "host1:\n.*SystemExit: enough"),
    ],
)
def test_a_failing_host_ends_the_others(
    net: ShapedNetwork, function: Callable[[int], None], message: str
) -> None:
    begin = time.monotonic()
    with pytest.raises(HostError, match=f"(?s){message}"):
        net.run(function)
    assert time.monotonic() - begin < 5


def test_a_host_that_is_asked_to_end_at_its_birth_ends(
    net: ShapedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was just forked forgets signals, until its interpreter is ready."""
    fork, test, started = os.fork, os.getpid(), 0

    def slow_birth() -> int:
        nonlocal started
        outside, pid = os.getpid() == test, fork()
        if outside:
            started += pid > 0
        elif pid == 0 and started != 1:
            forgotten = signal.signal(signal.SIGTERM, lambda *_: None)
            time.sleep(3)
            signal.signal(signal.SIGTERM, forgotten)
        return pid

    monkeypatch.setattr(os, "fork", slow_birth)
    begin = time.monotonic()
    with pytest.raises(HostError, match="host1 was killed"):
        net.run(_die_on_1)
    assert time.monotonic() - begin < GRACE_S, "the others had to be killed"


def test_a_run_that_takes_too_long_is_ended(net: ShapedNetwork) -> None:
    with pytest.raises(TimeoutError, match=r"hosts \[0, 2\] still run after 2 s"):
        net.run(lambda host: time.sleep(0 if host == 1 else 60), timeout_s=2)
    assert net.run(lambda host: host) == [0, 1, 2]


def test_a_wrong_change_is_refused_and_changes_nothing(net: ShapedNetwork) -> None:
    before = net.spec
    with pytest.raises(ValueError, match="--rate = 'fast'"):
        net.set_rates("fast")
    assert net.spec == before


def queues(_: int) -> list[str]:
    """The kinds of queues on this host's link."""
    with IPRoute() as ip:
        (link,) = ip.link_lookup(ifname="eth0")
        return sorted(queue.get_attr("TCA_KIND") for queue in ip.get_qdiscs(index=link))


def test_a_change_that_finds_other_queues_than_it_left_makes_them_anew(net: ShapedNetwork) -> None:
    def clear(_: int) -> None:
        with IPRoute() as ip:
            ip.tc("del", index=ip.link_lookup(ifname="eth0")[0], root=True)

    net.set_rates(pairs=["0,1=20mbit"])
    try:
        shaped = net.run(queues, hosts=[0])
        net.run(clear, hosts=[0])
        assert net.run(queues, hosts=[0]) == [["noqueue"]]
        net.set_rates(pairs=["0,1=10mbit"])
        assert net.run(queues, hosts=[0]) == shaped
        net.run(clear, hosts=[0])
    finally:
        net.set_rates("none", pairs=["0,1=none"])
    assert net.run(queues, hosts=[0]) == [["noqueue"]]


class _BusyKernel:
    """The kernel, but too busy for as many changes of queues as `busy` says."""

    def __init__(self, ip: IPRoute) -> None:
        self._ip, self.busy = ip, 0

    def link(self, *arguments: Any, **named: Any) -> Any:
        return self._ip.link(*arguments, **named)

    def tc(self, *arguments: Any, **named: Any) -> Any:
        if self.busy:
            self.busy -= 1
            raise NetlinkError(errno.EBUSY, os.strerror(errno.EBUSY))
        return self._ip.tc(*arguments, **named)


def test_a_busy_kernel_is_asked_again_but_not_for_ever(net: ShapedNetwork) -> None:
    def job(_: int) -> list[list[str]]:
        found = []
        with IPRoute() as ip:
            kernel = _BusyKernel(ip)
            shaper = Shaper(kernel, ip.link_lookup(ifname="eth0")[0])
            kernel.busy = 3
            shaper.apply(Shape(20e6))
            found.append(queues(0))
            kernel.busy = 100
            for _ in range(2):
                with pytest.raises(NetlinkError):
                    shaper.apply(Shape())
            kernel.busy = 0
            shaper.apply(Shape())
            found.append(queues(0))
        return found

    assert net.run(job, hosts=[0]) == [[["tbf"], ["noqueue"]]]


def test_a_change_that_the_kernel_refuses_is_refused_again_and_undone() -> None:
    def unplug(_: int) -> None:
        with IPRoute() as ip:
            ip.link("del", index=ip.link_lookup(ifname="eth0")[0])

    with ShapedNetwork(NetworkSpec.of(3)) as net:
        net.run(unplug, hosts=[2])
        for _ in range(2):
            with pytest.raises(ValueError, match=r"refuses .*uplink of host2: No such device"):
                net.set_rates("20mbit")
            assert net.run(queues, hosts=[0, 1]) == [["noqueue"]] * 2
        assert net.spec.rate_bps(0, 1) is None


def test_a_client_that_talks_nonsense_does_no_harm(net: ShapedNetwork) -> None:
    for message in (b"nonsense", b"[]", b'{"rate": 5}', b'{"pairs": [1]}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(f"\0thinpipe-shaped-{net.run_id}")
            client.send(message)
            assert b"error" in client.recv(1000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(f"\0thinpipe-shaped-{net.run_id}")
    assert net.run(lambda host: host) == [0, 1, 2]


def test_torch_groups_form_over_the_links(net: ShapedNetwork) -> None:
    import torch
    import torch.distributed as dist

    net.set_rates("50mbit")

    def job(_: int) -> float:
        dist.init_process_group("gloo")
        x = torch.ones(100_000)
        dist.barrier()
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            dist.all_reduce(x)
            seconds.append(time.perf_counter() - begin)
        dist.destroy_process_group()
        assert x[0].item() == 3.0**5
        return min(seconds)

    def slowest_s() -> float:
        found = max(net.run(job, timeout_s=90))
        assert found > 0.9 * ideal_s
        return found

    ideal_s = 2 * 2 / 3 * 3.2e6 / 50e6
    assert settles(slowest_s, 0.9 * ideal_s, 1.5 * ideal_s)


def test_what_the_kernel_lacks_is_named_with_a_remedy(
    net: ShapedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(_: int) -> None:
        with IPRoute() as ip:
            requirements.check(["veth", "bridge", "packet", "tbf", "htb", "u32"], ip)

    net.run(job, hosts=[0])  # tries them for real; leaves nothing
    assert net.run(lambda _: len(socket.if_nameindex()), hosts=[0]) == [2]
    monkeypatch.setattr(requirements, "_works", lambda piece, _: piece == "veth")
    with pytest.raises(
        HostError, match=r"lacks bridge \(.*CONFIG_BRIDGE\); packet \(.*CONFIG_PACKET"
    ):
        net.run(job, hosts=[0])
