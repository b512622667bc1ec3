"""Emulated networks from options and files, and what their hosts are told."""

import json
from pathlib import Path

import pytest

from thinpipe.launch.lab.names import environment, substitute
from thinpipe.launch.lab.shaping import gso_bytes
from thinpipe.launch.lab.spec import Change, NetworkSpec


@pytest.mark.parametrize(
    "text", ["100", "100mb", "-1mbit", "mbit", "7bit", "100gbit", "nanbit", "0bit"]
)
def test_a_wrong_rate_is_rejected_by_its_option(text: str) -> None:
    with pytest.raises(ValueError, match=r"--up = .*(mbit|gbit)"):
        NetworkSpec.of(2, up=text)


@pytest.mark.parametrize("text", ["20", "11s", "-1ms", "fast"])
def test_a_wrong_delay_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="--delay = "):
        NetworkSpec.of(2, delay=text)


def test_the_slowest_of_uplink_pair_and_downlink_counts() -> None:
    spec = NetworkSpec.of(3, up="100mbit,50mbit,80mbit", down="60mbit", pairs=["0,2=20mbit"])
    assert spec.rate_bps(0, 1) == 60e6
    assert spec.rate_bps(1, 0) == 50e6
    assert spec.rate_bps(0, 2) == spec.rate_bps(2, 0) == 20e6
    assert NetworkSpec.of(2).rate_bps(0, 1) is None


def test_up_and_down_replace_the_rate() -> None:
    spec = NetworkSpec.of(2, "10mbit", down="5mbit")
    assert (spec.up_bps, spec.down_bps) == ((10e6, 10e6), (5e6, 5e6))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "--hosts = 0"),
        ({"hosts": 65}, "--hosts = 65"),
        ({}, "--hosts is missing"),
        ({"hosts": 3, "up": "1mbit,2mbit"}, "2 rates for 3 hosts"),
        ({"hosts": 2, "pairs": ["0-1=1mbit"]}, "--pair = '0-1=1mbit'"),
        ({"hosts": 2, "pairs": ["0,2=1mbit"]}, "from 0 to 1"),
        ({"hosts": 2, "pairs": ["1,1=1mbit"]}, "two different hosts"),
        ({"hosts": 2, "pairs": ["0,1=1mbit", "1,0=2mbit"]}, "hosts 1 and 0 are given twice"),
        ({"hosts": 2, "rate": "1mbit", "pairs": ["0,1=none"]}, "no limit of its own to remove"),
        ({"hosts": 2, "pairs": ["0,1="]}, "--pair = ''.*or none"),
    ],
)
def test_inconsistent_options_are_rejected(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NetworkSpec.of(**arguments)  # type: ignore[arg-type]


def test_a_change_keeps_all_other_limits() -> None:
    spec = NetworkSpec.of(3, "100mbit", pairs=["0,1=20mbit", "1,2=30mbit"], delay="5ms")
    changed = spec.changed(Change(up="50mbit", pairs=["0,1=none"]))
    assert changed.up_bps == (50e6,) * 3
    assert changed.down_bps == (100e6,) * 3
    assert changed.pair_bps == {(1, 2): 30e6, (2, 1): 30e6}
    assert changed.delay_s == spec.delay_s


def test_a_matrix_gives_each_direction_its_rate_and_delay(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    content = {"rate_bps": [[0, 2e7], [None, 0]], "latency_s": [[0, 0.01], [0.03, 0]]}
    path.write_text(json.dumps(content))
    spec = NetworkSpec.of(matrix=path)
    assert spec.hosts == 2
    assert spec.pair_bps == {(0, 1): 2e7}
    assert spec.delay_s == {(0, 1): 0.01, (1, 0): 0.03}


def test_a_pair_overrides_or_removes_a_limit_of_the_matrix(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text('{"rate_bps": [[0, 2e7, null], [null, 0, 3e7], [4e7, 5e7, 0]]}')
    spec = NetworkSpec.of(rate="100mbit", matrix=path, pairs=["0,1=none", "1,2=6mbit"])
    assert spec.pair_bps == {(1, 2): 6e6, (2, 1): 6e6, (2, 0): 4e7}
    assert spec.rate_bps(0, 1) == 100e6, "up- and downlinks stay"
    with pytest.raises(ValueError, match="'0,1=none': this pair has no limit of its own"):
        spec.changed(Change(pairs=["0,1=none"]))


def test_a_matrix_of_another_size_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text('{"latency_s": [[0, 0.1], [0.1, 0]]}')
    with pytest.raises(ValueError, match="describes 2; leave out --hosts"):
        NetworkSpec.of(3, matrix=path)
    with pytest.raises(ValueError, match="No such file"):
        NetworkSpec.of(matrix=tmp_path / "absent.json")


def test_placeholders_are_replaced_and_other_braces_stay() -> None:
    text = '{rank} {host} {addr} {master} {"a": {}}'
    assert substitute(text, 1) == '1 host1 10.77.0.2 10.77.0.1 {"a": {}}'


def test_the_environment_has_the_variables_of_torch() -> None:
    variables = environment(1, 4)
    assert variables["RANK"] == variables["SHAPED_RANK"] == "1"
    assert (variables["WORLD_SIZE"], variables["MASTER_ADDR"]) == ("4", "10.77.0.1")


def test_packets_shrink_with_the_rate() -> None:
    sizes = [gso_bytes(bps) for bps in (10e6, 100e6, 1e9, None)]
    assert sizes == [1514, 5000, 16384, 65536]
