"""The README's way to several machines: one torchrun agent per host, here both on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import PATIENCE_S
from tests.launch.test_train import RUN
from tests.ports import free_port

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def agent(port: int, run: Path, log: Path) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"),
        *("-m", "thinpipe.launch", "train", str(run), "--set", "pipeline.cuts=[1]"),
        *("--set", "pipeline.replicas=2", "--set", "train.batch_size=6"),
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment
        )


def test_two_agents_train_two_replicas_of_two_stages(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(4000)))
    run = tmp_path / "run.toml"
    run.write_text(RUN.format(folder=tmp_path / "run", text=text))
    port, logs = free_port(), [tmp_path / "host0", tmp_path / "host1"]
    agents = [agent(port, run, log) for log in logs]
    try:
        codes = [process.wait(timeout=PATIENCE_S) for process in agents]
    finally:
        for process in agents:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join(log.read_text(encoding="utf-8") for log in logs)
    for log in logs:  # every host shows progress
        assert "loss" in log.read_text(encoding="utf-8")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["replicas"] == 2
    assert summary["sync_bytes"] > 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-12"
    parts = {path.stem for path in checkpoint.glob("*.safetensors")}
    assert parts == {f"replica-{r}.rank-{p}" for r in range(2) for p in range(2)}
