"""A run over several machines loses some and goes on, and one leaves when asked to."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.faults.hosts import HostsRun, kill_machine
from tests.launch.net.overlay.test_run import HOSTS, net
from tests.launch.run.elastic.launchers import RUN, SAMPLES, TWO_BY_TWO
from tests.processes import lives
from tests.shaped import shaped
from tests.texts import write_squares
from tests.waiting import until
from thinpipe.launch.checkpoint import files
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.net.ranks.failures import LOST

__all__ = ["net"]
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def started(
    net: ShapedNetwork,
    folder: Path,
    *settings: str,
    hosts: int = HOSTS,
    method: str = "ef_gradients",
) -> HostsRun:
    config = RUN.format(folder=folder, text=write_squares(folder / "text.txt"), method=method)
    settings = ("network.patience_s=3", "pipeline.peer_timeout_s=60", *settings)
    return HostsRun(net, folder, config, *settings, hosts=hosts)


def said_by(run: HostsRun, host: int) -> str:
    log = run.log(host)
    return " ".join(log.read_text(encoding="utf-8").split()) if log.exists() else ""


def trained(run: HostsRun) -> dict[str, int]:
    summary = json.loads((run.run_folder(0) / "summary.json").read_text(encoding="utf-8"))
    return dict(summary["samples"])


def test_a_machine_is_killed_another_leaves_and_the_last_saves(
    net: ShapedNetwork, tmp_path: Path
) -> None:
    run = started(net, tmp_path)
    run.wait_for_step(8)
    killed, before_s = kill_machine(run, 2), time.monotonic()
    done = run.steps()
    until(lambda: run.steps() > done + 1)
    took_s = time.monotonic() - before_s
    until(lambda: run.steps() >= 30)
    psutil.Process(run.pids[1]).send_signal(signal.SIGTERM)
    until(lambda: "left the run after step" in said_by(run, 1))
    done = run.steps()
    until(lambda: run.steps() > done + 1)
    psutil.Process(run.pids[0]).send_signal(signal.SIGTERM)
    codes = run.done()
    assert (codes[0], codes[1]) == (128 + signal.SIGTERM,) * 2, run.text()
    said = said_by(run, 0)
    assert "lost: rank 2 on host2: its machine is gone" in said
    assert "samples go to 2 replicas in place of 3" in said
    assert "lost: rank 1 on host1: asked to stop" in said
    assert "samples go to 1 replica in place of 2" in said
    assert "stopped: everything up to step" in said
    assert took_s < 30
    until(lambda: not any(map(lives, killed)))


def test_another_machine_takes_the_place_of_one_that_was_killed(
    net: ShapedNetwork, tmp_path: Path
) -> None:
    """It need not know its name. Its replica trains as if it had been there from the start."""
    run = started(net, tmp_path, "train.epochs=6", "network.patience_s=30")
    run.wait_for_step(8)
    killed = kill_machine(run, 2)
    until(lambda: "its machine is gone" in said_by(run, 0))
    run.start(2, "network.name=other", joins=True)
    until(lambda: "joined: host2, as rank 3" in said_by(run, 0) or run.has_ended())
    assert "other takes the place of host2, which is lost, and its name" in said_by(run, 2)
    codes = run.done()
    assert "s, in training" in said_by(run, 0)
    assert (codes[0], codes[1], codes[2]) == (0, 0, 0), run.text()
    assert trained(run) == {str(epoch): SAMPLES for epoch in range(1, 7)}
    assert files.steps(run.checkpoints(2))[-9:] == files.steps(run.checkpoints(0))[-9:]
    until(lambda: not any(map(lives, killed)))


def test_two_machines_bring_a_replica_of_two_stages(tmp_path: Path) -> None:
    """One is lost, and the other with it; both come back, each with a rank."""
    with shaped(NetworkSpec.of(4, "100mbit", delay="1ms")) as net:
        run = started(net, tmp_path, *TWO_BY_TWO, "train.epochs=40", hosts=4)
        run.wait_for_step(8)
        kill_machine(run, 3)
        until(lambda: "its machine is gone" in said_by(run, 0))
        until(lambda: 2 in run.codes or bool(run.has_ended()))
        assert "this machine is out of the run, which goes on without it; --join" in said_by(run, 2)
        run.start(2, joins=True, options=("--ranks", "1"))
        until(lambda: "with the rest of a replica (1 of 2 ranks)" in said_by(run, 2))
        run.start(3, joins=True, options=("--ranks", "1"))
        until(lambda: "as ranks 4, 5" in said_by(run, 0) or run.has_ended())
        assert "joined: host2, host3, as ranks 4, 5" in said_by(run, 0), run.text()
        done = run.steps()
        until(lambda: run.steps() > done + 10)
        assert "hold different rows" not in run.text()
        psutil.Process(run.pids[0]).send_signal(signal.SIGTERM)
        codes = run.done()
    assert codes[0] == 128 + signal.SIGTERM, run.text()
    assert files.steps(run.checkpoints(3))[-1] == files.steps(run.checkpoints(0))[-1]


def test_who_may_not_join_is_told_why(net: ShapedNetwork, tmp_path: Path) -> None:
    run = started(net, tmp_path, "train.epochs=12")
    run.wait_for_step(8)
    kill_machine(run, 2)
    until(lambda: "its machine is gone" in said_by(run, 0))
    run.start(2, "train.lr=0.5", joins=True)
    until(lambda: "this machine has train.lr = 0.5, the run has" in said_by(run, 2))
    until(lambda: files.steps(run.checkpoints(2)))
    own = run.checkpoints(2) / f"step-{files.newest(run.checkpoints(2))}"
    saved = files.read_manifest(own)
    saved.meta["config"]["run"]["seed"] = 77  # as if another run had saved here
    files.write_manifest(own, replace(saved))
    run.start(2, joins=True)
    until(lambda: "was made with run.seed = 77, this run has" in said_by(run, 2))
    psutil.Process(run.pids[0]).send_signal(signal.SIGTERM)
    codes = run.done()
    assert codes[0] == 128 + signal.SIGTERM, run.text()


def test_of_two_machines_that_lose_each_other_one_goes_on(
    net: ShapedNetwork, tmp_path: Path
) -> None:
    run = started(net, tmp_path)
    run.wait_for_step(8)

    def cut() -> None:
        subprocess.run(["ip", "route", "add", "blackhole", "10.77.0.3/32"], check=True)

    run.on(1, cut)
    codes = run.done()
    assert (codes[0], codes[1], codes[2]) == (0, 0, LOST), run.text()
    assert "lost: rank 2 on host2: its machine is gone" in said_by(run, 0)
    assert "the others go on without it" in said_by(run, 2)
    assert "this machine is out of the run, which goes on without it; --join" in said_by(run, 2)
    assert trained(run) == {"1": SAMPLES, "2": SAMPLES}


def test_a_run_is_stopped_from_any_machine(net: ShapedNetwork, tmp_path: Path) -> None:
    run = started(net, tmp_path)
    run.wait_for_step(8)
    words = [sys.executable, "-m", "thinpipe.launch", "stop"]

    def stop(folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*words, str(folder)], capture_output=True, text=True, check=False)

    elsewhere = run.on(0, lambda: stop(run.run_folder(1)))
    assert elsewhere.returncode == 2
    assert "its run trains on host1; stop it there" in elsewhere.stderr
    done = run.on(1, lambda: stop(run.run_folder(1)))
    assert "all ranks save after the same step" in done.stdout, done.stderr
    codes = run.done()
    assert codes[1] == 128 + signal.SIGTERM, run.text()
    assert "stopped: everything up to step" in said_by(run, 0)
    assert files.steps(run.checkpoints(0))
    nobody = stop(run.run_folder(1))
    assert nobody.returncode == 2
    assert "no run is training there" in nobody.stderr
