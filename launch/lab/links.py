"""Creates emulated hosts: each has network and host-name namespaces and a link to a switch."""

import socket
from dataclasses import dataclass
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from thinpipe.launch.host.links import MTU
from thinpipe.launch.lab import linux
from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.lab.names import host_address, host_mac, host_name
from thinpipe.launch.lab.requirements import needs
from thinpipe.launch.lab.shaping import Shape, Shaper, uplink
from thinpipe.launch.lab.spec import NetworkSpec

BUFFER_BYTES = 64 << 20
"""Limit of a TCP connection's data in flight; the default allows some 200 Mbit/s at 100 ms."""
_IPV4 = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class Host:
    """Descriptors of a host's namespaces; the shapers of its link."""

    net_fd: int
    uts_fd: int
    up: Shaper
    down: Shaper


def build_hosts(spec: NetworkSpec) -> list[Host]:
    """Create the hosts with shaped links to this network namespace; they end with this process."""
    switch_fd, switch = linux.namespace("net"), IPRoute()
    _no_ipv6()
    switch.link("set", index=1, state="up")  # the loopback, which is down in a new namespace
    bridge = None if spec.delay_s else _add(switch, "switch", "bridge")
    hosts = [
        _build_host(spec, host, switch=switch, switch_fd=switch_fd, bridge=bridge)
        for host in range(spec.hosts)
    ]
    shape_hosts(spec, hosts)
    return hosts


def shape_hosts(spec: NetworkSpec, hosts: list[Host]) -> None:
    """Set every link to the rates of `spec`.

    Raises:
        ShapedError: the kernel rejects one; links after that are as they were.
    """
    for index, host in enumerate(hosts):
        for direction, shaper, shape in (
            ("uplink", host.up, uplink(spec, index)),
            ("downlink", host.down, Shape(spec.down_bps[index])),
        ):
            try:
                shaper.apply(shape)
            except (NetlinkError, OSError) as error:
                where = f"{direction} of {host_name(index)}"
                raise ShapedError(
                    f"the kernel rejects these rates ({where}: {error.args[-1]})"
                ) from None


def _no_ipv6() -> None:
    switch = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    if switch.exists():
        switch.write_text("1", encoding="utf-8")  # of links that are made from here on


def _add(switch: IPRoute, name: str, kind: str, **options: object) -> int:
    with needs(kind):
        switch.link("add", ifname=name, kind=kind, mtu=MTU, **options)
    index: int = switch.link_lookup(ifname=name)[0]
    switch.link("set", index=index, state="up")
    return index


def _build_host(
    spec: NetworkSpec, host: int, *, switch: IPRoute, switch_fd: int, bridge: int | None
) -> Host:
    linux.unshare(linux.NEW_NET | linux.NEW_UTS)
    try:
        socket.sethostname(host_name(host))
        net_fd, uts_fd, ip = linux.namespace("net"), linux.namespace("uts"), IPRoute()
        _no_ipv6()
        end = {"ifname": "eth0", "address": host_mac(host), "mtu": MTU, "net_ns_fd": net_fd}
        port = _add(switch, f"h{host}", "veth", peer=end)
        if bridge is not None:
            switch.link("set", index=port, master=bridge)
        interface = _configure(spec, host, ip)
    finally:
        linux.setns(switch_fd, linux.NEW_NET)  # the host's IPRoute stays where it was made
    return Host(net_fd, uts_fd, Shaper(ip, interface), Shaper(switch, port))


def _configure(spec: NetworkSpec, host: int, ip: IPRoute) -> int:
    """Set address, route and neighbors; called inside the host's namespace."""
    interface: int = ip.link_lookup(ifname="eth0")[0]
    ip.link("set", index=1, state="up")
    ip.addr("add", index=interface, address=host_address(host), prefixlen=24)
    ip.link("set", index=interface, state="up")
    _use_cubic(host, ip, interface)
    for name in ("tcp_wmem", "tcp_rmem") if spec.delay_s else ():
        (_IPV4 / name).write_text(f"4096 131072 {BUFFER_BYTES}", encoding="utf-8")
    for other in range(spec.hosts):
        if other != host:  # static, so that no link carries address resolution
            ip.neigh(
                "replace",
                dst=host_address(other),
                lladdr=host_mac(other),
                ifindex=interface,
                state="permanent",
            )
    return interface


def _use_cubic(host: int, ip: IPRoute, interface: int) -> None:
    """The same congestion control on every host; by route, as the sysctl may be read-only."""
    available = _IPV4 / "tcp_available_congestion_control"
    if "cubic" not in available.read_text(encoding="utf-8"):
        return
    ip.route(
        "replace",
        dst=host_address(-1) + "/24",
        oif=interface,
        prefsrc=host_address(host),
        scope=253,  # RT_SCOPE_LINK
        proto=2,  # RTPROT_KERNEL: in place of the route that came with the address
        metrics={"cc_algo": "cubic"},
    )
