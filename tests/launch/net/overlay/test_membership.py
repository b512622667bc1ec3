"""Who is in a run, in which order, and who connects to whom."""

import itertools
import socket
from ipaddress import ip_address

from thinpipe.launch.net.overlay.links.handshake import Hello
from thinpipe.launch.net.overlay.membership import MOST_HOSTS, Host, Membership, loopback_address


def host(name: str, *, reachable: bool = True, incarnation: str = "1") -> Host:
    return Host(
        name=name, address="10.0.0.9", port=29500, reachable=reachable, incarnation=incarnation
    )


def members(coordinator: str, *hosts: Host) -> Membership:
    membership = Membership(coordinator, len(hosts))
    for one in hosts:
        assert membership.join(one) is None
    return membership


def test_hosts_are_in_the_order_of_their_names_as_people_count() -> None:
    names = ["host10", "host2", "host1", "lab-b", "lab-a"]
    roster = members("host2", *map(host, names)).roster
    assert roster.is_complete
    assert [h.name for h in roster.hosts] == ["host1", "host2", "host10", "lab-a", "lab-b"]


def test_of_two_hosts_exactly_one_dials_and_it_can_reach_the_other() -> None:
    roster = members("b", host("a"), host("b"), host("c", reachable=False), host("d")).roster
    for one, other in itertools.combinations("abcd", 2):
        assert roster.dials(one, other) != roster.dials(other, one)
    for other in "abd":
        assert roster.dials("c", other)
    assert all(roster.dials(other, "b") for other in "acd")


def test_two_hosts_that_cannot_reach_each_other_are_named() -> None:
    membership = Membership("a", 3)
    assert membership.join(host("a")) is None
    assert membership.join(host("b", reachable=False)) is None
    assert membership.join(host("b", reachable=False, incarnation="2")) is None  # comes again
    assert membership.join(host("c", reachable=False)) == "b"
    assert [h.name for h in membership.roster.hosts] == ["a", "b"]


def test_a_host_that_leaves_before_the_start_is_waited_for_again() -> None:
    membership = Membership("a", 3)
    for name in "ab":
        membership.join(host(name))
    membership.leave("b", "another incarnation")
    assert len(membership.roster.hosts) == 2
    membership.leave("b", "1")
    assert [h.name for h in membership.roster.hosts] == ["a"]
    full = members("a", host("a"), host("b"))
    full.leave("b", "1")  # it only learnt who is in the run
    assert full.roster.is_complete


def test_refusals_have_reasons() -> None:
    full = members("a", host("a"), host("b"))

    def refusal(name: str, hosts: int = 2) -> str:
        return full.refusal(Hello(purpose="join", name=name, hosts=hosts))

    assert "started with 3; start all machines with the same" in refusal("b", 3)
    assert "has its 2 machines already (a, b)" in refusal("c")
    assert "another machine is named 'a'" in refusal("a")
    assert refusal("b") == ""  # it was started again


def test_addresses_of_hosts_differ_also_between_runs() -> None:
    runs = ("0a11", "ff22", "fff3")
    addresses = {loopback_address(run, host) for run in runs for host in range(MOST_HOSTS)}
    assert len(addresses) == len(runs) * MOST_HOSTS
    assert all(ip_address(address).is_loopback for address in addresses)
    others = ("127.0.0.1", "127.0.1.1", "127.255.255.255")  # names resolve to, and broadcast
    assert not addresses.intersection(others)
    with socket.create_server((loopback_address("fff3", MOST_HOSTS - 1), 0)):
        pass
