"""Checks that compare hosts and links: pure, so that every host has the same results."""

import math
import statistics
from collections.abc import Sequence

from thinpipe.launch.doctor.host import CheckResult, HostInfo, ok, problem, warning
from thinpipe.launch.doctor.links import LinkInfo
from thinpipe.launch.host.links import format_rate
from thinpipe.launch.net.overlay.membership import PeerList
from thinpipe.launch.net.ranks.handshake import differences

_SLOW_SHARE = 1 / 3  # of the median rate; slower links get a warning
_CLOCK_S = 1.0  # a warning: logs do not match; runs need no equal clocks
_FAR_S = 0.005  # from this round trip on relays use BBR, or else padding (overlay/links)
_BUFFER_SHARE = 0.35
"""Share of a socket buffer's limit that is usable for data in flight: 4 MB limited one stream to
200 Mbit/s at a round trip of 100 ms, which is 2.5 MB."""


def check_all(hosts: Sequence[HostInfo], links: Sequence[LinkInfo]) -> list[CheckResult]:
    """All checks that need several hosts."""
    names = names_of(hosts)
    return [
        *_same(hosts),
        *_open(hosts, names, links),
        *_clocks(names, links),
        *_mtu(names, links),
        *_rates(names, links),
        *_buffers(hosts, names, links),
        *_slow_start(hosts, links),
    ]


def names_of(hosts: Sequence[HostInfo]) -> list[str]:
    """Host names; with the address if several hosts have the same name."""
    names = [host.name for host in hosts]
    return [
        host.name if names.count(host.name) == 1 else f"{host.name}/{host.address}:{host.port}"
        for host in hosts
    ]


def _same(hosts: Sequence[HostInfo]) -> list[CheckResult]:
    first, results = hosts[0], []
    for other in hosts[1:]:
        same_versions = "install the same versions on all hosts (constraints.txt)"
        for what, theirs, ours, remedy in (
            ("versions", other.versions, first.versions, same_versions),
            ("config", other.config, first.config, "copy one run file to all hosts"),
        ):
            for key, value, expected in differences(dict(theirs), dict(ours)):
                text = f"{what}: {key} = {value}, {first.name} has {expected}"
                results.append(problem(other.name, text, remedy))
    return results or [ok("all", "same versions and config")]


def _open(
    hosts: Sequence[HostInfo], names: Sequence[str], links: Sequence[LinkInfo]
) -> list[CheckResult]:
    closed = [link for link in links if link.closed]
    if not closed:
        return [ok("all", "every host can connect to every other")] if links else []
    results = []
    for link in closed:
        source, target = hosts[link.source], hosts[link.target]
        results.append(
            problem(
                f"{names[link.source]} -> {names[link.target]}",
                f"cannot connect ({link.closed})",
                f"one of {source.name} and {target.name} must accept connections from the other: "
                "open the port of network.listen there (ufw allow 29500/tcp; with network.trusted "
                "all ports), and check that there is a route; where a machine is reached at "
                "another address, set network.peers",
            )
        )
    return results


def check_reachable(peer_list: PeerList) -> list[CheckResult]:
    """Hosts that no other can connect to: they connect themselves, so a run may have one."""
    return [
        ok(
            host.name,
            "no other machine can connect to it (NAT, a firewall or network.listen); it connects "
            "to all others itself, which a run can have one machine do",
        )
        for host in peer_list.hosts
        if not host.reachable
    ]


def _clocks(names: Sequence[str], links: Sequence[LinkInfo]) -> list[CheckResult]:
    return [
        warning(
            names[link.target],
            f"its clock is {abs(link.clock_offset_s):.1f} s "
            f"{'ahead of' if link.clock_offset_s > 0 else 'behind'} that of {names[link.source]}",
            "timedatectl set-ntp true (logs of the hosts will not match otherwise)",
        )
        for link in links
        if link.source == 0 and abs(link.clock_offset_s) > _CLOCK_S
    ]


def _mtu(names: Sequence[str], links: Sequence[LinkInfo]) -> list[CheckResult]:
    known = [link for link in links if link.path_mtu]
    largest = max((link.path_mtu for link in known), default=0)
    return [
        warning(
            f"{names[link.source]} -> {names[link.target]}",
            f"packets of {link.path_mtu} bytes at most, {largest} elsewhere",
            "usual with a VPN or tunnel; otherwise set all interfaces to the same MTU "
            "(ip link set dev IF mtu N)",
        )
        for link in known
        if link.path_mtu < largest
    ]


def _rates(names: Sequence[str], links: Sequence[LinkInfo]) -> list[CheckResult]:
    rates = [link.rate_bps for link in links if not link.closed]
    if len(rates) < 2:
        return []
    usual = statistics.median(rates)
    return [
        warning(
            f"{names[link.source]} -> {names[link.target]}",
            f"{format_rate(link.rate_bps)}, {usual / link.rate_bps:.1f} times slower than the "
            "median link",
            "use fewer bits at its cut (`thinpipe plan --network`), change the order of hosts, or "
            "find out what else uses the link",
        )
        for link in links
        if not link.closed and link.rate_bps < _SLOW_SHARE * usual
    ]


def _buffers(
    hosts: Sequence[HostInfo], names: Sequence[str], links: Sequence[LinkInfo]
) -> list[CheckResult]:
    """A stream cannot have more data in flight than fits its socket buffers."""
    results = []
    for link in links:
        in_flight = link.rate_bps * link.round_trip_s / 8
        limits = (
            ("tcp_wmem", hosts[link.source].send_buffer, names[link.source]),
            ("tcp_rmem", hosts[link.target].receive_buffer, names[link.target]),
        )
        for name, limit, where in limits:
            if link.closed or not limit or in_flight < _BUFFER_SHARE * limit:
                continue
            enough = 1 << math.ceil(math.log2(max(16 * in_flight, 8e6)))
            results.append(
                warning(
                    where,
                    f"net.ipv4.{name} allows at most {limit} bytes, which limits "
                    f"{names[link.source]} -> {names[link.target]} to "
                    f"{format_rate(link.rate_bps)} at a round trip of "
                    f"{link.round_trip_s * 1e3:.3g} ms",
                    f"sysctl -w net.ipv4.{name}='4096 131072 {enough}'",
                )
            )
    return results


def _slow_start(hosts: Sequence[HostInfo], links: Sequence[LinkInfo]) -> list[CheckResult]:
    far = {link.source for link in links if link.round_trip_s > _FAR_S and not link.bbr}
    return [
        warning(
            host.name,
            "net.ipv4.tcp_slow_start_after_idle = 1: TCP returns to slow start after each pause "
            "between messages, and BBR, which does not, is not available (messages are padded "
            "instead); with 50 ms of delay that doubled a step",
            "modprobe tcp_bbr and sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic "
            "bbr', or sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )
        for index, host in enumerate(hosts)
        if host.slow_start_after_idle and index in far
    ]
