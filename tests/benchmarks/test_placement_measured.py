"""Layouts on emulated hosts: the network is the cluster's, and the steps are real."""

import math

import numpy as np
import pytest

from benchmarks.placement import measured
from tests.shaped import shaped
from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.plan.placement.cluster_files import parse_cluster

GROUPS_SR = np.arange(8).reshape(4, 2)


@pytest.mark.parametrize("name", list(measured.NETWORKS))
def test_the_emulated_links_are_those_of_the_cluster(name: str) -> None:
    cluster = parse_cluster(measured.NETWORKS[name])
    spec = measured.network_of(cluster)
    assert cluster.devices == 8
    assert len({host.site for host in cluster.hosts}) == 3
    for source in range(8):
        for target in set(range(8)) - {source}:
            rate_bps = spec.rate_bps(source, target)
            assert rate_bps is not None
            assert rate_bps * PAYLOAD_SHARE == pytest.approx(cluster.rate_HH[source, target])
            assert spec.delay_s[source, target] == cluster.latency_HH[source, target]


@pytest.mark.slow
def test_layouts_are_predicted_beside_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without DT-FM's search, whose kernels take long to compile."""
    theirs = np.arange(8).reshape(4, 2)
    monkeypatch.setattr(measured, "genetic_search", lambda *_, **__: (theirs, None))
    monkeypatch.setattr(measured, "METHODS", measured.METHODS[-1:])
    measured.main(["--steps", "0", "--networks", "slow uplinks", "--tokens", "64"])
    table = [line.split("|") for line in capsys.readouterr().out.splitlines() if line[0] == "|"]
    steps = {row[1].strip(): float(row[5]) for row in table[2:]}
    assert steps.keys() == {"random", "DT-FM", "ours"}
    assert steps["ours"] <= min(steps["DT-FM"], steps["random"]) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.dist
def test_a_layout_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    shaped(NetworkSpec.of(2)).close()
    small = ["--tokens", "16", "--microbatches", "4", "--parameters", "10000"]
    measured.main(["--steps", "1", "--networks", "unequal machines", *small])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    found = [float(line.split("|")[6]) for line in lines[1:]]
    assert len(found) == 9
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in found)
