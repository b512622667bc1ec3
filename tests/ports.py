"""Ports for tests that must name one before anything listens there."""

import secrets
import socket

_FIRST, _COUNT = 15000, 14000


def free_port() -> int:
    """A port of loopback that neither the system nor this function gives to anybody else.

    Of its own choice (Linux: from 32768) the system may give one away again before a test listens
    there, or to a client that asks for the very port: that one is then connected to itself. Other
    test processes see the claim, which lasts as long as this process.
    """
    while True:
        port = _FIRST + secrets.randbelow(_COUNT)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim, socket.socket() as probe:
            try:
                claim.bind(f"\0thinpipe test port {port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            claim.detach()  # stays open
        return port


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
    return True


HAS_IPV6 = _has_ipv6()
LOOPBACK = "[::1]" if HAS_IPV6 else "127.0.0.1"
"""For `--rdzv`: IPv6 where there is any."""
