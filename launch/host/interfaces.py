"""This host's network interfaces, and which of them leads to another host.

gloo publishes the address of one interface (GLOO_SOCKET_IFNAME); without that variable, the
address that the host's own name resolves to, which on many systems is 127.0.1.1.
"""

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Interface:
    """An interface with an IPv4 address; `mtu` in bytes."""

    name: str
    address: str
    mtu: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach its address."""
        return ipaddress.ip_address(self.address).is_loopback


def interfaces() -> dict[str, Interface]:
    """This host's interfaces that have an IPv4 address, by name."""
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        ipv4 = [a.address for a in addresses if a.family == socket.AF_INET]
        if ipv4:
            found[name] = Interface(name, ipv4[0], _mtu(name))
    return found


def _mtu(name: str) -> int:
    """Bytes of a packet."""
    try:
        return int(psutil.net_if_stats()[name].mtu)
    except OSError:  # without /proc/net: ask the kernel
        get_mtu, form = 0x8921, "16si"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = fcntl.ioctl(
                any_socket, get_mtu, struct.pack(form, name.encode(), 0) + bytes(20)
            )
        return int(struct.unpack_from(form, asked)[1])


def resolve(host: str) -> str:
    """IPv4 address of a name, or the address itself.

    Raises:
        ValueError: the name cannot be resolved.
    """
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(
            f"{host}: this host cannot resolve the name ({error.strerror}); add a line with its "
            "address to /etc/hosts, or give the address instead of the name"
        ) from None


def reachable_address(host: str) -> str:
    """`resolve`, for an address that other hosts must be able to reach.

    Raises:
        ValueError: also if a name resolves to 127.x, as a host's own name does on Debian.
    """
    address = resolve(host)
    by_name = host != "localhost" and not host.startswith("127.")
    if by_name and ipaddress.ip_address(address).is_loopback:
        raise ValueError(
            f"{host}: resolves to {address} on this host, which no other host can reach; correct "
            "the line in /etc/hosts, or give the address instead of the name"
        )
    return address


def is_own_address(address: str) -> bool:
    """Whether an address is one of this host's."""
    return address in {found.address for found in interfaces().values()}


def interface_to(address: str) -> Interface:
    """The interface that an address is reached through; for an own address, the one that has it.

    Raises:
        ValueError: no interface has a route to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing, only looks up the route
        except OSError as error:
            raise ValueError(
                f"{address}: no interface of this host has a route to it ({error.strerror}); is "
                "the network, or the VPN, up?"
            ) from None
        own = probe.getsockname()[0]
    for found in interfaces().values():
        if found.address == own:
            return found
    raise ValueError(
        f"{address}: reached from {own}, which is not the address of an interface; use plain IPv4"
    )


def parse_endpoint(text: str) -> tuple[str, int]:
    """`host0:29500` as name and port.

    Raises:
        ValueError: it does not have that form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--rdzv = {text!r}: write a host and a port, as in host0:29500")
    return host, int(port)
