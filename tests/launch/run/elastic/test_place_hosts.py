"""A pipeline over several machines loses one; a spare machine takes its place."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.hosts import HostsRun, kill_machine
from tests.launch.net.overlay.test_run import HOSTS, net
from tests.launch.run.elastic import test_hosts as hosts
from tests.launch.run.elastic.test_hosts import said_by
from tests.processes import lives, named
from tests.waiting import until
from thinpipe.launch.checkpoint import files
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.net.ranks.failures import LOST
from thinpipe.launch.view.report.metrics import read_metrics

__all__ = ["net"]
pytestmark = [pytest.mark.dist, pytest.mark.slow]
PIPELINE = (
    "pipeline.peer_timeout_s=240",
    "pipeline.replicas=1",
    "pipeline.cuts=[1]",
    "pipeline.microbatches=2",
    "elastic={}",
    "train.epochs=8",
    "checkpoint.every_steps=50",
    "checkpoint.ram_every=5",
)


def started(net: ShapedNetwork, folder: Path, *settings: str) -> HostsRun:
    return hosts.started(net, folder, *PIPELINE, *settings, hosts=HOSTS - 1, method="allreduce")


def test_a_spare_machine_takes_the_place_of_one_that_was_killed(
    net: ShapedNetwork, tmp_path: Path
) -> None:
    run = started(net, tmp_path, "train.epochs=32")  # a spare takes seconds to be there
    run.wait_for_step(8)
    run.start(2, joins=True)
    until(lambda: "waiting as a spare" in said_by(run, 2))
    done = run.steps()
    until(lambda: run.steps() > done + 3)
    killed, before_s = kill_machine(run, 1), time.monotonic()
    until(lambda: "all went back" in said_by(run, 0) or run.has_ended())
    took_s = time.monotonic() - before_s
    codes = run.done()
    assert (codes[0], codes[2]) == (0, 0), run.text()
    assert "lost: rank 1 on host1: its machine is gone" in said_by(run, 0)
    assert "host2 takes the place of host1, which is lost, and its name" in said_by(run, 2)
    records = read_metrics(run.run_folder(0) / "metrics.jsonl")
    assert [record.step for record in records] == [*range(1, 1281)]
    summary = json.loads((run.run_folder(0) / "summary.json").read_text(encoding="utf-8"))
    assert set(summary["samples"].values()) == {240}
    assert files.newest(run.checkpoints(0)) == files.newest(run.checkpoints(2)) == 1280
    assert took_s < 60
    until(lambda: not any(map(lives, killed)))


def test_a_killed_rank_ends_its_machine_which_may_come_back(
    net: ShapedNetwork, tmp_path: Path
) -> None:
    run = started(net, tmp_path)
    run.wait_for_step(8)
    (rank,) = named(psutil.Process(run.pids[1]).children(recursive=True), "thinpipe 1")
    rank.send_signal(signal.SIGKILL)
    until(lambda: 1 in run.codes or run.has_ended())
    assert run.codes[1] == LOST, run.text()
    assert "the run goes on without it; --join brings it back" in said_by(run, 1)
    until(lambda: "waiting for a machine in its place" in said_by(run, 0))
    run.start(1, joins=True)
    codes = run.done()
    assert (codes[0], codes[1]) == (0, 0), run.text()
    assert "all went back" in said_by(run, 0)


def test_without_another_machine_it_ends_as_before(net: ShapedNetwork, tmp_path: Path) -> None:
    run = started(net, tmp_path, "pipeline.peer_timeout_s=8")
    run.wait_for_step(8)
    kill_machine(run, 1)
    codes = run.done()
    assert codes[0] == 1, run.text()
    said = said_by(run, 0)
    assert "no machine came in its place within 8 s (pipeline.peer_timeout_s)" in said
    assert "no checkpoint was saved yet" in said


def test_a_spare_ends_with_the_run(net: ShapedNetwork, tmp_path: Path) -> None:
    run = started(net, tmp_path, "train.epochs=400")
    run.wait_for_step(4)
    run.start(2, joins=True)
    until(lambda: "waiting as a spare" in said_by(run, 2))
    psutil.Process(run.pids[0]).send_signal(signal.SIGTERM)
    codes = run.done()
    assert (codes[0], codes[2]) == (128 + signal.SIGTERM, 1), run.text()
    assert "the run does not answer any more" in said_by(run, 2)
