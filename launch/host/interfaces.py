"""This host's network interfaces, and which of them leads to another host.

gloo publishes the address of one interface (GLOO_SOCKET_IFNAME); without that variable, the
address that the host's own name resolves to, which on many systems is 127.0.1.1.
"""

import ipaddress
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

_RESOLVER = Path("/etc/resolv.conf")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)  # the first is preferred where a host has both


@dataclass(frozen=True)
class Interface:
    """An interface; `address` is one of its `addresses`, by default the first, IPv4 before IPv6."""

    name: str
    address: str
    addresses: tuple[str, ...] = ()

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def interfaces() -> dict[str, Interface]:
    """This host's interfaces that have an address, by name."""
    found = {}
    for name, all_of_it in psutil.net_if_addrs().items():
        addresses = [
            a.address
            for family in _FAMILIES
            for a in all_of_it
            if a.family == family and not _is_link_local(a.address)
        ]
        if addresses:
            found[name] = Interface(name, addresses[0], tuple(addresses))
    return found


def resolve(host: str) -> str:
    """An address of a name, or the address itself; IPv4, unless only IPv6 leads there.

    Raises:
        ValueError: the name cannot be resolved.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a host name"
        if isinstance(error, OSError) and error.errno == socket.EAI_AGAIN:
            reason = f"no name server answers: {_name_servers()}"
        raise ValueError(
            f"{host}: this host cannot resolve the name ({reason}); add a line with its "
            "address to /etc/hosts, or give the address instead of the name"
        ) from None
    addresses = [
        plain(str(address[0]))
        for family in _FAMILIES
        for found, *_, address in entries
        if found == family
    ]
    usable = [address for address in addresses if not _is_link_local(address)]
    if not usable:
        raise ValueError(
            f"{host}: a link-local address, which means another machine on each interface; use "
            "one of the machine's other addresses"
        )
    return next((address for address in usable if _own_end(address)), usable[0])


def reachable_address(host: str) -> str:
    """`resolve`, for an address that other hosts must be able to reach.

    Raises:
        ValueError: also if a name resolves to 127.x, as a host's own name does on Debian.
    """
    address = resolve(host)
    by_name = host not in ("localhost", address) and not host.startswith("127.")
    if by_name and ipaddress.ip_address(address).is_loopback:
        raise ValueError(
            f"{host}: resolves to {address} on this host, which no other host can reach; correct "
            "the line in /etc/hosts, or give the address instead of the name"
        )
    return address


def is_own_address(address: str) -> bool:
    """Whether an address is one of this host's."""
    return any(address in found.addresses for found in interfaces().values())


def interface_to(address: str) -> Interface:
    """The interface to an address, with its own address on the way; ValueError without a route."""
    own = _own_end(address)
    for found in interfaces().values():
        if own in found.addresses:
            return replace(found, address=own)
    raise ValueError(
        f"{address}: no interface of this host has a route to it; is the network, or the VPN, up?"
    )


def parse_endpoint(text: str, setting: str = "--rdzv") -> tuple[str, int]:
    """Name and port of `host0:29500` or `[2001:db8::1]:29500`; ValueError names the setting."""
    parts = re.fullmatch(r"(?:\[([^]\[/]+)\]|([^:/\[\]]+)):([0-9]{1,5})", text)
    if parts is None or not 0 < int(parts[3]) < 65536:
        raise ValueError(
            f"{setting} = {text!r}: write a host and a port, as in host0:29500 (ports end at "
            "65535); an IPv6 address goes in brackets, as in [2001:db8::1]:29500"
        )
    host = parts[1] or parts[2]
    if re.fullmatch(r"[0-9]+(\.[0-9]+)+", host):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(
                f"{setting} = {text!r}: {host} is no IPv4 address, which has four numbers up to "
                "255; correct it, as in 10.0.0.1:29500"
            ) from None
    return host, int(parts[3])


def format_endpoint(host: str, port: int) -> str:
    """Name and port as `parse_endpoint` reads them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(address: str) -> socket.AddressFamily:
    """Whether it is an IPv4 or an IPv6 address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def serve(address: tuple[str, int], *, backlog: int | None = None) -> socket.socket:
    """Listen at an address, not a name (`::`: all, IPv4 too); OSError if in use or not ours."""
    both = address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        address, family=family_of(address[0]), backlog=backlog, dualstack_ipv6=both
    )


def plain(address: str) -> str:
    """An IPv4 address that an IPv6 socket has seen, as IPv4."""
    return address.removeprefix("::ffff:")


def _own_end(address: str) -> str | None:
    """This host's address on the way to another; None without a route."""
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing, only looks up the route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _is_link_local(address: str) -> bool:
    return address.startswith("fe80:")


def _name_servers() -> str:
    try:
        lines = _RESOLVER.read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{_RESOLVER} cannot be read"
    names = [line.split()[1] for line in lines if re.match(r"nameserver\s+\S", line)]
    return f"{_RESOLVER} names {', '.join(names) or 'none'}"
