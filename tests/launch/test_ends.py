"""How runs end that are interrupted, stopped or killed: nothing stays, and all say why."""

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.commands import PATIENCE_S, Command
from tests.launch.test_train import ranks_of, run_file, start, thinpipe, wait_until
from tests.processes import lives
from thinpipe.launch.checkpoint import files
from thinpipe.launch.view.report.journal import Told

__all__ = ["run_file"]

pytestmark = pytest.mark.dist

ENDLESS = ("--set", "train.epochs=100000", "--set", "checkpoint.every_steps=99999")


def steps_of(run_file: Path) -> int:
    """How many steps a run has made."""
    metrics = run_file.parent / "run" / "metrics.jsonl"
    return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="thinpipe-test-") as folder:
        yield Path(folder)


@pytest.fixture
def long_run(run_file: Path, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of three ranks that has made a few steps and would go on for very long."""
    process = start(run_file, *ENDLESS, TMPDIR=str(temporary))
    try:
        wait_until(lambda: steps_of(run_file) > 3 or process.poll() is not None, PATIENCE_S)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        wait_until(lambda: not ranks_of(process.pid), PATIENCE_S)


@pytest.mark.slow
def test_the_folder_of_a_live_run_is_left_alone_and_a_killed_rank_ends_it(
    run_file: Path, long_run: subprocess.Popen[str]
) -> None:
    done = thinpipe(run_file, code=2)
    ranks = ranks_of(long_run.pid)
    assert f"another run is using it (process {ranks[0]} on " in done.stderr
    assert long_run.poll() is None
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = long_run.communicate(timeout=PATIENCE_S)
    assert long_run.returncode == 1
    check_that_the_edge_is_named(output, 1)
    cause = f"rank 1 on {socket.gethostname()}: killed by signal 9 (SIGKILL)"
    assert any(line.startswith(cause) for line in output.splitlines()), output
    for rank in (0, 2):
        *_, last = (text for text in output.splitlines() if text.startswith(f"rank {rank}: "))
        assert cause in last, output
    assert cause in str(Told(run_file.parent / "run").ended), "the page says it too"
    assert not ranks_of(long_run.pid)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_edge_to_a_killed_rank_is_named(run_file: Path, victim: int) -> None:
    run = Command("train", run_file, *ENDLESS)
    try:
        wait_until(lambda: steps_of(run_file) > 3, PATIENCE_S)
        kill(run, victim, signal.SIGKILL)
        done = run.done()
    finally:
        run.kill()
    assert done.returncode == 1
    check_that_the_edge_is_named(done.stderr, victim)


def kill(run: Command, rank: int, number: signal.Signals) -> None:
    children = psutil.Process(run.pid).children()
    (process,) = (child for child in children if child.name() == f"thinpipe {rank}")
    process.send_signal(number)


def check_that_the_edge_is_named(output: str, victim: int) -> None:
    for rank in {0, 1, 2} - {victim}:
        own = [line for line in output.splitlines() if line.startswith(f"rank {rank}: ")]
        assert any(f"rank {victim}" in line for line in own), output


@pytest.mark.parametrize("method", [None, "none", pytest.param("diloco", marks=pytest.mark.slow)])
def test_sigterm_to_one_rank_saves_on_all(run_file: Path, method: str | None) -> None:
    """Stages, or replicas, which may never wait for each other."""
    replicas = ["pipeline.cuts=[]", "pipeline.replicas=2", "train.batch_size=6"]
    settings = [*replicas, f"gradcomp.method={method}"] if method else []
    run = Command("train", run_file, *ENDLESS, *(f"--set={setting}" for setting in settings))
    try:
        wait_until(lambda: steps_of(run_file) > 3, PATIENCE_S)
        kill(run, 1, signal.SIGTERM)
        done = run.done()
    finally:
        run.kill()
    assert done.returncode == 143
    (step,) = files.steps(run_file.parent / "run" / "checkpoints")
    said = f"asked to stop: step {step} is saved, then the run ends\n"
    assert said in done.stderr
    assert f"stopped: everything up to step {step} is saved; continue from there" in done.stderr


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_launcher(long_run: subprocess.Popen[str]) -> None:
    assert len(ranks_of(long_run.pid)) == 3
    long_run.kill()
    wait_until(lambda: not ranks_of(long_run.pid), PATIENCE_S)


@pytest.mark.slow
def test_a_killed_supervisor_is_named_last(long_run: subprocess.Popen[str]) -> None:
    """Its rank ends with it, and others see no more than connections that broke."""
    children = psutil.Process(long_run.pid).children(recursive=True)
    next(child for child in children if child.name() == "thinpipe wait").kill()
    output, _ = long_run.communicate(timeout=PATIENCE_S)
    assert long_run.returncode == 1
    *said, dead = output.splitlines()
    killed = f" on {socket.gethostname()}: killed by signal 9 (SIGKILL): if nobody did that, "
    assert dead.startswith("the supervisor of local rank ")
    assert killed in dead
    assert len({line.split(":")[0] for line in said if line.startswith("rank ")}) == 2, output


@pytest.mark.slow
def test_a_killed_resource_tracker_is_not_missed(long_run: subprocess.Popen[str]) -> None:
    """It is multiprocessing's, and clears away what a killed launcher leaves."""
    children = psutil.Process(long_run.pid).children()
    (tracker,) = (c for c in children if "resource_tracker import main" in " ".join(c.cmdline()))
    tracker.kill()
    wait_until(lambda: not lives(tracker), PATIENCE_S)
    long_run.send_signal(signal.SIGTERM)
    output, _ = long_run.communicate(timeout=PATIENCE_S)
    assert long_run.returncode == 128 + signal.SIGTERM
    assert "resource_tracker" not in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_killed_fork_server_is_named(long_run: subprocess.Popen[str]) -> None:
    """Its ranks end with it, and the launcher knows no more than that they are gone."""
    children = psutil.Process(long_run.pid).children()
    (server,) = (child for child in children if child.name() == "thinpipe server")
    server.kill()
    output, _ = long_run.communicate(timeout=PATIENCE_S)
    assert long_run.returncode not in (0, None)
    assert "the process that starts this machine's ranks is gone: it was killed, or" in output
    assert "--resume continues from the last checkpoint" in output
    assert not ranks_of(long_run.pid)
