"""Checks of conditions that tests cannot create: other clocks, tunnels, versions."""

from dataclasses import replace

from thinpipe.launch.doctor.checks import check_all
from thinpipe.launch.doctor.host import CheckResult, HostInfo
from thinpipe.launch.doctor.links import LinkInfo

ONE = HostInfo(
    name="a",
    address="10.0.0.1",
    port=1,
    send_buffer=4 << 20,
    receive_buffer=6 << 20,
    slow_start_after_idle=False,
    versions={"torch": "2.13.0"},
    config={"train": {"lr": 1e-3}},
)
TWO = replace(ONE, name="b", address="10.0.0.2")
FAR = LinkInfo(0, 1, None, round_trip_s=0.1, rate_bps=50e6, path_mtu=1500)
BACK = replace(FAR, source=1, target=0)


def bad(*links: LinkInfo, two: HostInfo = TWO) -> list[CheckResult]:
    return [f for f in check_all([ONE, two], links or (FAR, BACK)) if f.level != "ok"]


def test_equal_hosts_on_a_good_link_have_no_problems() -> None:
    assert bad() == []


def test_versions_are_compared() -> None:
    (found,) = bad(two=replace(TWO, versions={"torch": "2.11.0"}))
    assert (found.level, found.where) == ("problem", "b")
    assert found.text == "versions: torch = 2.11.0, a has 2.13.0"


def test_a_wrong_clock_is_reported_once() -> None:
    (found,) = bad(replace(FAR, clock_offset_s=-90.0), replace(BACK, clock_offset_s=90.0))
    assert (found.where, found.text) == ("b", "its clock is 90.0 s behind that of a")
    assert "set-ntp" in found.remedy


def test_a_link_with_a_smaller_mtu_is_reported() -> None:
    (found,) = bad(FAR, replace(BACK, path_mtu=1420))
    assert found.where == "b -> a"
    assert "1420 bytes at most, 1500 elsewhere" in found.text


def test_buffers_must_hold_the_data_in_flight() -> None:
    held = replace(FAR, rate_bps=200e6)  # what 4 MB gave at a round trip of 100 ms
    roomy = replace(TWO, send_buffer=64 << 20, receive_buffer=64 << 20)
    (found,) = bad(held, BACK, two=roomy)
    assert (found.where, found.level) == ("a", "warning")
    assert found.remedy == "sysctl -w net.ipv4.tcp_wmem='4096 131072 67108864'"
    (found,) = bad(FAR, replace(BACK, rate_bps=200e6), two=roomy)
    assert found.remedy == "sysctl -w net.ipv4.tcp_rmem='4096 131072 67108864'"


def test_slow_start_after_idle_is_reported_only_for_long_round_trips() -> None:
    two = replace(TWO, slow_start_after_idle=True)
    (found,) = bad(two=two)
    assert found.remedy.endswith("sysctl -w net.ipv4.tcp_slow_start_after_idle=0")
    assert bad(FAR, replace(BACK, bbr=True), two=two) == []
    near = [replace(link, round_trip_s=0.0005) for link in (FAR, BACK)]
    assert bad(*near, two=two) == []


def test_hosts_with_the_same_name_are_shown_with_addresses() -> None:
    (found,) = bad(replace(FAR, closed="no answer"), BACK, two=replace(TWO, name="a", port=2))
    assert found.where == "a/10.0.0.1:1 -> a/10.0.0.2:2"
