"""Three emulated hosts with one fault after the other: each is reported with its remedy."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from pyroute2 import IPRoute

from tests.invoking import invoke
from tests.shaped import shaped
from thinpipe.launch.config.network import KEY_FILE
from thinpipe.launch.host.network import Network
from thinpipe.launch.lab.names import host_address
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.plan.placement.cluster_files import read_cluster

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SYSCTL = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class Host:
    """Faults of a host, and the options of its doctor."""

    options: tuple[str, ...] = ()
    sysctls: Mapping[str, str] | None = None
    small_disk: Path | None = None
    unreachable: int | None = None


HEALTHY = Host(sysctls={"tcp_slow_start_after_idle": "0"})
TRUSTED = ("--set", "network.trusted=true")


class Outcome(NamedTuple):
    code: int
    text: str


@pytest.fixture
def net() -> Iterator[ShapedNetwork]:
    """40 Mbit/s and 20 ms there and back; 40 times slower between host0 and host2.

    A network per test, as tests change routes and kernel settings in it.
    """
    with shaped(NetworkSpec.of(3, "40mbit", delay="10ms", pairs=["0,2=1mbit"])) as network:
        yield network


def diagnose(net: ShapedNetwork, tmp_path: Path, hosts: list[Host], *more: str) -> list[Outcome]:
    run = tmp_path / "run.toml"
    cuts = [2, 4] if len(hosts) == 3 else list(range(1, len(hosts)))
    run.write_text(
        f"[run]\nfolder = '{tmp_path}/run'\n[pipeline]\ncuts = {cuts}\n"
        f"[model]\nlayers = {max(6, len(hosts))}\n"
    )
    common = ["doctor", str(run), "--nnodes", str(len(hosts)), "--rdzv", "host0:29500"]
    if not (tmp_path / "run.key").exists():
        keys.new(tmp_path / "run.key")
    os.environ[KEY_FILE] = str(tmp_path / "run.key")

    def doctor(host: int) -> Outcome:
        _prepare(hosts[host])
        arguments = [*common, "--seconds", "0.3", *more, *hosts[host].options]
        arguments += ["--save", str(tmp_path / f"net{host}.json")]
        return Outcome(*invoke(*arguments))

    return net.run(doctor, timeout_s=60 + 20 * len(hosts))


def _prepare(host: Host) -> None:
    for name, text in (host.sysctls or {}).items():
        (SYSCTL / name).write_text(text)
    if host.small_disk is not None:
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(host.small_disk)]
        subprocess.run(mount, check=True)
    if host.unreachable is not None:
        with IPRoute() as ip:
            ip.route("add", dst=f"{host_address(host.unreachable)}/32", type="blackhole")


def test_a_slow_link_is_found_and_the_network_saved(net: ShapedNetwork, tmp_path: Path) -> None:
    hidden = Host(options=("--set", "network.listen=none"))
    found = diagnose(net, tmp_path, [Host(), Host(), hidden])
    assert [outcome.code for outcome in found] == [0, 0, 0], found
    for outcome in found:
        assert "host2: no other machine can connect to it" in outcome.text
        assert "host1: no other machine" not in outcome.text
        assert "warning host0 -> host2: " in outcome.text, outcome.text
        assert "times slower than the median link -> use fewer bits at its cut" in outcome.text
        assert "net.ipv4.tcp_slow_start_after_idle" not in outcome.text  # BBR is in use
        assert f"key {tmp_path}/run.key, valid until 20" in outcome.text
        assert "every host can connect to every other" in outcome.text
    network = Network.read(tmp_path / "net1.json")
    rates = {(i, j): (network.rate_bps[i][j] or 0) / 1e6 for i, j in [(0, 1), (1, 2), (2, 0)]}
    for link, mbit in (((0, 1), 40), ((1, 2), 40), ((2, 0), 1)):  # a busy machine measures less
        assert 0 < rates[link] < 1.2 * mbit
    assert 0.01 <= network.latency_s[0][1] < 0.5


def test_problems_of_a_host_are_reported_on_all(net: ShapedNetwork, tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    folder = ("--set", f"run.folder={disk}/run")
    limited = Host(folder, sysctls={"tcp_wmem": "4096 16384 32768"}, small_disk=disk)
    other = Host(("--set", "train.lr=0.5"))
    found = diagnose(net, tmp_path, [Host(), limited, other], *TRUSTED)
    assert [outcome.code for outcome in found] == [1, 1, 1], found
    for outcome in found:
        for text in (
            "problem host2: config: train.lr = 0.5, host0 has 0.001 -> copy one run file",
            "warning host1: net.ipv4.tcp_wmem allows at most 32768 bytes",
            "-> sysctl -w net.ipv4.tcp_wmem='4096 131072 8388608'",
            f"problem host1: run.folder = {disk}/run: a checkpoint takes",
            f"but {disk} has 65.5 kB free; free disk space, or name a folder on a larger disk",
        ):
            assert text in outcome.text, outcome.text


def test_without_bbr_the_kernels_setting_is_named(net: ShapedNetwork, tmp_path: Path) -> None:
    found = diagnose(net, tmp_path, [Host(), HEALTHY, HEALTHY], *TRUSTED)
    for outcome in found:
        assert "host0: net.ipv4.tcp_slow_start_after_idle = 1" in outcome.text
        assert "host1: net.ipv4.tcp_slow_start_after_idle" not in outcome.text


def test_hosts_that_cannot_connect_report_the_reason(net: ShapedNetwork, tmp_path: Path) -> None:
    nowhere, closed = Host(("--rdzv", "nowhere:29500")), Host(("--rdzv", "host0:29501"))
    found = diagnose(net, tmp_path, [Host(), nowhere, closed], "--wait", "3")
    waiting, unresolved, unreachable = found
    assert (waiting.code, unresolved.code, unreachable.code) == (1, 1, 1)
    assert "3 machines did not join within 3 s: only host0" in waiting.text
    assert "nowhere: this host cannot resolve the name" in unresolved.text
    assert "add a line with its address to /etc/hosts" in unresolved.text
    assert "10.77.0.1:29501 cannot be reached: Connection refused" in unreachable.text


def test_a_foreign_key_is_named(net: ShapedNetwork, tmp_path: Path) -> None:
    keys.new(tmp_path / "other.key")
    other = Host(options=("--set", f"network.key_file={tmp_path}/other.key"))
    found = diagnose(net, tmp_path, [Host(), Host(), other], "--wait", "15")
    assert "its key is another run's; copy one key file to all machines" in found[2].text
    assert "3 machines did not join within 15 s: only host0" in found[0].text


def test_a_blocked_link_is_reported(net: ShapedNetwork, tmp_path: Path) -> None:
    found = diagnose(net, tmp_path, [Host(), Host(unreachable=2), Host()])
    for outcome in found:
        assert outcome.code == 1
        assert "problem host1 -> host2: cannot connect (no answer)" in outcome.text
        assert "one of host1 and host2 must accept connections from the other" in outcome.text
        assert "problem host0" not in outcome.text


def test_sixteen_hosts_are_measured_in_rounds(tmp_path: Path) -> None:
    with shaped(NetworkSpec.of(16, "20mbit", delay="5ms", pairs=["3,12=2mbit"])) as net:
        found = diagnose(net, tmp_path, [Host()] * 16, "--wait", "200")
    for outcome in found:
        assert outcome.code == 0, outcome.text
        assert "of this host's 30 links" in outcome.text
        assert "warning host12 -> host3: " in outcome.text
    cluster = read_cluster(tmp_path / "net5.json")
    assert cluster.devices == 16
    assert cluster.rate_HH[3, 12] < 2.4e6 < cluster.rate_HH[3, 11] < 24e6
    assert 0 < cluster.memory_D.min() < cluster.memory_D.max() < 1e13
    assert cluster.speed_D[0] == 1
