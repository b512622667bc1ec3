"""Whole runs on emulated hosts: private, exact, and healed when the network breaks."""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.commands import PATIENCE_S
from tests.faults.hosts import PORT, HostsRun, cut_off
from tests.launch.test_train import RUN, thinpipe, wait_until
from tests.processes import lives, named, signal_all
from tests.shaped import shaped
from tests.texts import write_squares
from tests.waiting import until
from thinpipe.launch.checkpoint import files
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.view.report.metrics import read_metrics

pytestmark = [pytest.mark.dist, pytest.mark.slow]

HOSTS = 3


@pytest.fixture
def net() -> Iterator[ShapedNetwork]:
    with shaped(NetworkSpec.of(HOSTS, "100mbit", delay="1ms")) as network:
        yield network


def start(
    net: ShapedNetwork,
    folder: Path,
    *settings: str,
    options: Sequence[str] = (),
    own: Mapping[int, Sequence[str]] | None = None,
) -> HostsRun:
    text = write_squares(folder / "text.txt")
    config = RUN.format(folder=folder / "one", text=text)
    return HostsRun(net, folder, config, *settings, hosts=HOSTS, options=options, own=own)


def alone(folder: Path, *settings: str) -> list[float]:
    """Losses of the same run on one machine."""
    words = [word for setting in settings for word in ("--set", setting)]
    thinpipe(folder / "run.toml", *words, code=0)
    return [record.loss for record in read_metrics(folder / "one" / "metrics.jsonl")]


def listening(_host: int) -> list[tuple[str, int]]:
    found = psutil.net_connections("inet")
    return [(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN]


def test_a_run_has_one_port_at_most_and_the_losses_of_one_machine(
    net: ShapedNetwork, tmp_path: Path
) -> None:
    run = start(net, tmp_path, own={2: ["network.listen=none"]})  # as behind NAT
    run.wait_for_step(2)
    for host, ports in enumerate(net.run(listening)):
        outside = [port for address, port in ports if not address.startswith("127.")]
        assert outside == ([PORT] if host < 2 else []), (host, ports)
    assert run.done() == dict.fromkeys(range(HOSTS), 0), run.text()
    assert run.losses() == alone(tmp_path)


def test_an_outage_changes_nothing_and_is_reported(net: ShapedNetwork, tmp_path: Path) -> None:
    longer = "train.epochs=12"
    run = start(net, tmp_path, longer)
    run.wait_for_step(3)

    def connected() -> set[bool]:
        """Of host 2's links."""
        return {link["connected"] for link in run.status(2)["links"].values()}

    cut_off(run, 2, True, ways="out")
    until(lambda: connected() == {False})
    time.sleep(3)  # which the report shows
    cut_off(run, 2, False, ways="out")
    assert run.done() == dict.fromkeys(range(HOSTS), 0), run.text()
    assert run.losses() == alone(tmp_path, longer)
    edges = json.loads((tmp_path / "0" / "summary.json").read_text(encoding="utf-8"))["edges"]
    assert {(edge["source"], edge["target"]) for edge in edges} == {
        (f"host{a}", f"host{b}") for a in range(HOSTS) for b in range(HOSTS) if a != b
    }
    disturbed = {edge["target"] for edge in edges if edge["source"] == "host2" and edge["resumed"]}
    assert disturbed == {"host0", "host1"}
    for words in ("connection to host2 lost (", "connection to host2 is back", "host2 → host0"):
        assert words in run.printed(0)
    traces = json.loads((tmp_path / "0" / "edges.json").read_text(encoding="utf-8"))
    assert set(traces) == {f"host{host}" for host in range(HOSTS)}
    assert sum(sample["resumed"] for sample in traces["host2"]) > 0
    assert max(sample["silence_s"] for sample in traces["host0"]) > 2
    page = (tmp_path / "0" / "report.html").read_text(encoding="utf-8")
    assert "Connections between machines" in page


def test_a_lost_machine_is_named_on_both_sides(net: ShapedNetwork, tmp_path: Path) -> None:
    patience_s = 15  # a busy machine stalls for seconds
    run = start(net, tmp_path, "train.epochs=500", f"network.patience_s={patience_s}")
    run.wait_for_step(3)
    cut_off(run, 2, True, ways="out")
    start_s = time.monotonic()
    codes = run.done()
    assert time.monotonic() - start_s < patience_s + PATIENCE_S  # not pipeline.peer_timeout_s
    assert set(codes.values()) == {1}, run.text()
    for host in range(2):
        assert "no connection to host2 for " in run.printed(host), run.text()
    isolated = run.printed(2)
    assert "no connection to " in isolated
    assert "host0 for " in isolated, isolated


def test_a_killed_rank_is_known_everywhere(net: ShapedNetwork, tmp_path: Path) -> None:
    run = start(net, tmp_path, "train.epochs=500")
    run.wait_for_step(3)
    (rank,) = named(psutil.Process(run.pids[1]).children(recursive=True), "thinpipe 1")
    rank.kill()
    run.done()
    cause = "rank 1 on host1: killed by signal 9 (SIGKILL)"
    for host in (0, 2):
        said = run.printed(host)
        accounts = (f"first failure: {cause}", f"ended because of another rank: {cause}")
        assert any(account in said for account in accounts), run.text()


def test_where_all_meet_a_lost_relay_ends_the_run_at_once(
    net: ShapedNetwork, tmp_path: Path
) -> None:
    run = start(net, tmp_path, "train.epochs=500", options=("--max-restarts", "3"))
    run.wait_for_step(3)
    run.relay(0).kill()
    start_s = time.monotonic()
    codes = run.done()
    assert time.monotonic() - start_s < PATIENCE_S  # the others give it up at once
    assert set(codes.values()) == {1}, run.text()
    said = "the process that connects this machine with the others has ended: it was killed"
    assert said in run.printed(0), run.text()


def test_sigterm_to_every_process_of_a_machine_saves_on_all(
    net: ShapedNetwork, tmp_path: Path
) -> None:
    """Its relay among them; nobody waits for the machine to come back."""
    settings = ("train.epochs=500", "checkpoint.every_steps=99999")
    run = start(net, tmp_path, *settings, options=("--max-restarts", "1"))
    run.wait_for_step(3)
    launcher = psutil.Process(run.pids[1])
    signal_all((launcher, *launcher.children(recursive=True)), signal.SIGTERM)
    assert run.done() == {0: 1, 1: 128 + signal.SIGTERM, 2: 1}, run.text()
    steps = [files.steps(tmp_path / str(host) / "checkpoints") for host in range(HOSTS)]
    assert len(steps[0]) == 1, run.text()
    assert steps == [steps[0]] * HOSTS
    for host in range(HOSTS):
        said = run.printed(host)
        assert f"asked to stop: step {steps[0][0]} is saved, then the run ends" in said
        assert f"stopped: everything up to step {steps[0][0]} is saved" in said
        assert "Traceback" not in said
    for host in (0, 2):
        assert "not restarted: the run was asked to stop" in run.printed(host)


def test_a_machine_whose_launcher_died_comes_back(net: ShapedNetwork, tmp_path: Path) -> None:
    settings = ("train.epochs=24", "checkpoint.every_steps=20")
    run = start(net, tmp_path, *settings, options=("--max-restarts", "1"))
    latest = tmp_path / "0" / "checkpoints" / "latest"
    wait_until(latest.exists, PATIENCE_S)
    launcher = psutil.Process(run.pids[1])
    tree = launcher.children(recursive=True)
    launcher.kill()
    os.waitpid(run.pids.pop(1), 0)
    until(lambda: not any(map(lives, tree)))
    run.start(1)
    assert run.done() == dict.fromkeys(range(HOSTS), 0), run.text()
    assert run.losses() == alone(tmp_path, *settings)
