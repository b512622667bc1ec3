"""Addresses of this host and of others: names, several addresses, both families."""

import socket

import pytest

from tests.namespaces import in_namespace, interface, ip
from tests.ports import HAS_IPV6
from thinpipe.launch.host.interfaces import (
    format_endpoint,
    interface_to,
    interfaces,
    is_own_address,
    parse_endpoint,
    plain,
    resolve,
    serve,
)

BOTH = """127.0.0.1 localhost
10.9.0.2 both
fd09::2 both
fd09::2 six
10.1.0.2 unreachable
fd09::2 unreachable
"""


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("host0:29500", "host0", 29500),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[2001:db8::1]:29500", "2001:db8::1", 29500),
        ("[::]:65535", "::", 65535),
    ],
)
def test_an_endpoint_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == (host, port)
    assert format_endpoint(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        *("host0", ":29500", "host0:", "host0:0", "host0:65536", "host0:٣", "http://host0:1"),
        *("::1:29500", "[::1]", "[]:1", "[::1:29500", "2001:db8::1"),
    ],
)
def test_what_is_no_endpoint_is_rejected_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"host0:29500.*\[2001:db8::1\]:29500"):
        parse_endpoint(text)


def test_every_address_of_an_interface_is_known_as_ours() -> None:
    def look() -> list[object]:
        interface("one", "10.9.0.2/24", "10.9.0.3/24", "fd09::2/64")
        ip("addr add 10.8.0.2/24 dev one label one:1")  # as ifconfig names a second one
        ip("route add 10.7.0.0/24 dev one src 10.9.0.3")
        return [
            sorted(interfaces().keys() - {"one-far"}),
            [is_own_address(a) for a in ("10.9.0.2", "10.9.0.3", "10.8.0.2", "fd09::2", "fd09::3")],
            [interface_to(a).address for a in ("10.9.0.9", "10.7.0.9", "10.8.0.9", "fd09::9")],
        ]

    names, own, ends = in_namespace(look)
    assert names == ["lo", "one", "one:1"]
    assert own == [True, True, True, True, False]
    assert ends == ["10.9.0.2", "10.9.0.3", "10.8.0.2", "fd09::2"]


def test_a_name_gives_ipv4_unless_only_ipv6_leads_there() -> None:
    def look() -> list[str]:
        interface("one", "10.9.0.1/24", "fd09::1/64")
        return [resolve(name) for name in ("both", "six", "unreachable")]

    found = in_namespace(look, files={"/etc/hosts": BOTH})
    assert found == ["10.9.0.2", "fd09::2", "fd09::2"]


def test_a_resolver_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")

    def look() -> str:
        interface("one", "10.9.0.1/24")
        ip("neigh add 10.9.0.53 lladdr 02:00:00:00:00:53 dev one")
        with pytest.raises(ValueError, match="cannot resolve") as failed:
            resolve("nowhere.example")
        return str(failed.value)

    files = {"/etc/resolv.conf": "nameserver 10.9.0.53\n", "/etc/nsswitch.conf": "hosts: files dns"}
    said = in_namespace(look, files=files)
    assert "(no name server answers: /etc/resolv.conf names 10.9.0.53)" in said
    assert "/etc/hosts" in said


@pytest.mark.parametrize(
    ("name", "why"),
    [("fe80::1", "link-local"), *((n, "cannot resolve") for n in ("x" * 70, "a..b", "café..x"))],
)
def test_what_can_be_no_name_of_another_is_rejected(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        resolve(name)


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
def test_all_addresses_of_ipv6_include_those_of_ipv4() -> None:
    with serve(("::", 0)) as server:
        port = server.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, port)) as client:
                accepted, peer = server.accept()
                accepted.close()
                assert plain(peer[0]) == address == client.getpeername()[0]
