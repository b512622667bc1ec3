"""Who is in a run, in which order, and who connects to whom."""

import itertools
import socket
from ipaddress import ip_address

from thinpipe.launch.net.overlay.links.handshake import Hello
from thinpipe.launch.net.overlay.membership import MOST_HOSTS, Host, Membership, loopback_address


def host(name: str, *, reachable: bool = True, instance: str = "1") -> Host:
    return Host(name=name, address="10.0.0.9", port=29500, reachable=reachable, instance=instance)


def members(coordinator: str, *hosts: Host) -> Membership:
    membership = Membership(coordinator, len(hosts))
    for one in hosts:
        assert membership.join(one) is None
    return membership


def test_hosts_are_in_the_order_of_their_names_as_people_count() -> None:
    names = ["host10", "host2", "host1", "lab-b", "lab-a"]
    peer_list = members("host2", *map(host, names)).peer_list
    assert peer_list.is_complete
    assert [h.name for h in peer_list.hosts] == ["host1", "host2", "host10", "lab-a", "lab-b"]


def test_of_two_hosts_exactly_one_dials_and_it_can_reach_the_other() -> None:
    peer_list = members("b", host("a"), host("b"), host("c", reachable=False), host("d")).peer_list
    for one, other in itertools.combinations("abcd", 2):
        assert peer_list.dials(one, other) != peer_list.dials(other, one)
    for other in "abd":
        assert peer_list.dials("c", other)
    assert all(peer_list.dials(other, "b") for other in "acd")


def test_two_hosts_that_cannot_reach_each_other_are_named() -> None:
    membership = Membership("a", 3)
    assert membership.join(host("a")) is None
    assert membership.join(host("b", reachable=False)) is None
    assert membership.join(host("b", reachable=False, instance="2")) is None  # comes again
    assert membership.join(host("c", reachable=False)) == "b"
    assert [h.name for h in membership.peer_list.hosts] == ["a", "b"]


def test_a_host_that_leaves_before_the_start_is_waited_for_again() -> None:
    membership = Membership("a", 3)
    for name in "ab":
        membership.join(host(name))
    membership.leave("b", "another instance")
    assert len(membership.peer_list.hosts) == 2
    membership.leave("b", "1")
    assert [h.name for h in membership.peer_list.hosts] == ["a"]
    full = members("a", host("a"), host("b"))
    full.leave("b", "1")  # it only learnt who is in the run
    assert full.peer_list.is_complete


def test_rejections_have_reasons() -> None:
    full = members("a", host("a"), host("b"))

    def rejection(name: str, hosts: int = 2) -> str:
        return full.rejection(Hello(purpose="join", name=name, hosts=hosts))

    assert "started with 3; start all machines with the same" in rejection("b", 3)
    assert "has its 2 machines already (a, b)" in rejection("c")
    assert "another machine is named 'a'" in rejection("a")
    assert rejection("b") == ""  # it was started again
    assert rejection("b", 0) == ""
    assert "none of the run's machines (a, b) is lost, so c cannot" in rejection("c", 0)
    early = Membership("a", 2)
    early.join(host("a"))
    spare = Hello(purpose="join", name="b", hosts=0)
    assert "has not begun" in early.rejection(spare)
    assert early.is_spare(spare), "it may wait"
    assert early.place(spare, ["a"]) is None


def test_only_one_that_comes_later_may_have_the_place_of_a_lost_host() -> None:
    full = members("a", host("a"), host("b10"), host("b9"))
    newcomer, early = (Hello(purpose="join", name="c", hosts=hosts) for hosts in (0, 3))
    assert full.place(newcomer, ["b10", "b9"]) == "b9"
    assert full.is_spare(newcomer)
    assert not full.is_spare(early)
    assert not full.is_spare(newcomer.model_copy(update={"name": "b9"})), "it is started twice"
    assert full.place(newcomer, []) is None
    assert full.place(early, ["b9"]) is None
    assert full.place(Hello(purpose="join", name="b9", hosts=0), ["b10"]) is None


def test_addresses_of_hosts_differ_also_between_runs() -> None:
    runs = ("0a11", "ff22", "fff3")
    addresses = {loopback_address(run, host) for run in runs for host in range(MOST_HOSTS)}
    assert len(addresses) == len(runs) * MOST_HOSTS
    assert all(ip_address(address).is_loopback for address in addresses)
    others = ("127.0.0.1", "127.0.1.1", "127.255.255.255")  # names resolve to, and broadcast
    assert not addresses.intersection(others)
    with socket.create_server((loopback_address("fff3", MOST_HOSTS - 1), 0)):
        pass
