"""Machines between which there is no IPv4, and that know each other by names of IPv6 alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_train import run_file
from tests.namespaces import in_namespace, ip
from tests.waiting import PATIENCE_S, until
from thinpipe.launch.net.overlay import keys
from thinpipe.launch.view.report.metrics import read_metrics

__all__ = ["run_file"]

NAMES = "::1 localhost\nfd00:77::1 alpha\nfd00:77::2 beta\n"


def _train(run_file: Path) -> list[tuple[int, str]]:
    """On alpha, in this network, and on beta, in one of its own; exit codes and output."""
    with subprocess.Popen(["unshare", "--net", "sleep", "600"]) as beta:
        own, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{beta.pid}/ns/net")
        until(lambda: os.readlink(theirs) != os.readlink(own))
        ip(f"link add alpha type veth peer name beta netns {beta.pid}")
        there = ["nsenter", "--target", str(beta.pid), "--net", "--"]
        ends: dict[str, list[str]] = {"alpha": [], "beta": there}
        runs = []
        for number, (name, inside) in enumerate(ends.items(), start=1):
            address = f"ip addr add fd00:77::{number}/64 dev {name} nodad"
            for words in ("ip link set lo up", f"ip link set {name} up", address):
                subprocess.run([*inside, *words.split()], check=True)
        for name, inside in ends.items():
            words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(run_file)]
            words += ["--nnodes", "2", "--rdzv", "alpha:29500", "--set", "pipeline.cuts=[2]"]
            words += ["--set", f"run.folder={run_file.parent / name}"]
            key = {"THINPIPE_KEY_FILE": str(run_file.parent / "run.key"), "THINPIPE_NAME": name}
            runs.append(
                subprocess.Popen(
                    [*inside, *words],
                    env={**os.environ, **key, "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [run.communicate(timeout=PATIENCE_S)[0] for run in runs]
        beta.kill()
    return [(run.returncode, text) for run, text in zip(runs, said, strict=True)]


@pytest.mark.slow
@pytest.mark.dist
def test_machines_whose_names_lead_to_ipv6_alone_train(run_file: Path) -> None:
    keys.new(run_file.parent / "run.key")
    for code, said in in_namespace(lambda: _train(run_file), files={"/etc/hosts": NAMES}):
        assert code == 0, said
    assert read_metrics(run_file.parent / "alpha" / "metrics.jsonl")[-1].loss > 0
