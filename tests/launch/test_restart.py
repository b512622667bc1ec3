"""Ranks that torchrun's agents start again go on from the last checkpoint by themselves."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.commands import PATIENCE_S
from tests.launch.test_train import command, ranks_of, run_file, thinpipe
from tests.ports import free_port
from tests.processes import named
from tests.programs import ran
from tests.waiting import until
from thinpipe.launch.checkpoint.resume import Resume, after_restart
from thinpipe.launch.net.ranks.network import ROUND
from thinpipe.launch.view.report.metrics import read_metrics

__all__ = ["run_file"]


def test_only_a_restart_resumes_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert after_restart(Resume(False)) == Resume(False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert after_restart(Resume(False)) == Resume(True, required=False)
    assert after_restart(Resume(True, 8)) == Resume(True, 8, required=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # of the machine that came back
    monkeypatch.setenv(ROUND, "2")
    assert after_restart(Resume(False)) == Resume(True, required=False)


@pytest.mark.slow
@pytest.mark.dist
def test_what_a_restart_cannot_change_is_not_tried_again(run_file: Path) -> None:
    assert thinpipe(run_file, "--set", "checkpoint.every_steps=3").returncode == 0
    checkpoints = run_file.parent / "run" / "checkpoints"
    parts = [*checkpoints.rglob("*.safetensors")]
    assert parts
    for part in parts:
        part.write_bytes(part.read_bytes()[:100])
    done = ran(*command(run_file, "--resume", "--max-restarts", "3"), code=2)
    assert done.stderr.count("no step is whole") == 1, done.stderr
    assert "not restarted: a restart would end the same way" in done.stderr


def node(run: Path, log: Path, *meeting: str) -> subprocess.Popen[str]:
    settings = ("pipeline.cuts=[2]", "train.epochs=100", "checkpoint.every_steps=50")
    words = command(run, *(f"--set={one}" for one in settings), "--max-restarts", 1, *meeting)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        return subprocess.Popen(words, stdout=out, stderr=out, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("end", ["it comes back", "it does not", "Ctrl-C"])
def test_a_machine_whose_launcher_died_is_waited_for(run_file: Path, end: str) -> None:
    comes_back = end == "it comes back"
    place = f"127.0.0.1:{free_port()}"
    logs = [run_file.parent / name for name in ("a", "b", "b again")]

    def begin(number: int) -> subprocess.Popen[str]:
        name = f"network.name={logs[number].name[0]}"
        meeting = ["--nnodes", "2", "--rdzv", place, "--set", name]
        # it is the limit of the start too, which a busy machine must not miss
        limit = ["--set", "pipeline.peer_timeout_s=90"] if end == "it does not" else []
        return node(run_file, logs[number], *meeting, *limit)

    nodes = [begin(0)]
    try:
        until(lambda: "waiting for 2 machines" in logs[0].read_text(encoding="utf-8"))
        nodes.append(begin(1))
        latest = run_file.parent / "run" / "checkpoints" / "latest"
        until(lambda: latest.exists() or any(n.poll() for n in nodes))
        nodes[1].kill()
        until(lambda: "waiting for machine b, " in logs[0].read_text(encoding="utf-8"))
        if comes_back:
            nodes.append(begin(2))
        if end == "Ctrl-C":
            nodes[0].send_signal(signal.SIGINT)
        codes = [process.wait(timeout=PATIENCE_S) for process in nodes]
    finally:
        for process in nodes:
            process.kill()
            process.wait()
    said = logs[0].read_text(encoding="utf-8")
    if comes_back:
        assert codes == [0, -signal.SIGKILL, 0], said + logs[2].read_text(encoding="utf-8")
        steps = read_metrics(run_file.parent / "run" / "metrics.jsonl")
        assert [record.step for record in steps] == list(range(1, 501))
        assert "restarting" in said
        return
    if end == "Ctrl-C":
        assert codes == [128 + signal.SIGINT, -signal.SIGKILL], said
        *_, last = said.splitlines()
        assert last == "asked to stop before the restart: the run ends at its last checkpoint"
        return
    assert codes == [1, -signal.SIGKILL], said
    assert "machine b did not come within 90 s (pipeline.peer_timeout_s); run `th" in said


SAID = {
    "rank": "restarting, 1 of 1: rank ",
    "thinpipe wait": "the supervisor of local rank ",
    "thinpipe server": "the process that starts this machine's ranks is gone: it was killed",
}
"""What is said of a killed process, by its name."""


def victims_of(launcher: int, name: str) -> list[int]:
    """Processes of this name, or a launcher's ranks."""
    if name == "rank":
        return list(ranks_of(launcher).values())
    processes = psutil.Process(launcher).children(recursive=True)
    return [process.pid for process in named(processes, name)]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("victim", "machines"), [("rank", 2), ("thinpipe wait", 1), ("thinpipe server", 1)]
)
def test_a_killed_process_costs_the_steps_since_the_last_checkpoint(
    run_file: Path, victim: str, machines: int
) -> None:
    folder = run_file.parent / "run"
    meeting = ["--nnodes", str(machines), "--rdzv", f"127.0.0.1:{free_port()}"]
    logs = [run_file.parent / f"host{n}" for n in range(machines)]
    nodes = [node(run_file, log, *(meeting if machines > 1 else [])) for log in logs]

    def said() -> str:
        return "\n".join(log.read_text(encoding="utf-8") for log in logs)

    try:
        latest = folder / "checkpoints" / "latest"
        until(lambda: latest.exists() or any(n.poll() for n in nodes))
        assert latest.exists(), said()
        found: list[int] = []
        until(lambda: found.extend(victims_of(nodes[-1].pid, victim)) or found)
        os.kill(found[0], signal.SIGKILL)
        assert [process.wait(timeout=PATIENCE_S) for process in nodes] == [0] * machines, said()
    finally:
        for process in nodes:
            process.kill()
            process.wait()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 500
    steps = [record.step for record in read_metrics(folder / "metrics.jsonl")]
    assert steps == list(range(1, 501))  # one history, without the steps that were lost
    assert not (folder.parent / "run.1").exists()
    assert "restarting, 1 of 1: " in said()
    assert SAID[victim] in said(), said()
    if victim != "thinpipe server":
        assert "killed by signal 9 (SIGKILL)" in said().split(SAID[victim])[1].splitlines()[0]
