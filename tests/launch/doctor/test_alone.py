"""What one host finds out by itself, and before it waits for others."""

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.cli import app
from tests.ports import free_port


def doctor(path: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", str(path), *options], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(f"[run]\nfolder = '{tmp_path}/run'\n[pipeline]\ncuts = [2, 4]\n")
    return path


def test_ranks_that_hosts_cannot_share_are_refused_without_waiting(run_file: Path) -> None:
    start_s = time.monotonic()
    code, said = doctor(run_file, "--nnodes", "2", "--wait", "60")
    assert code == 2
    assert "--nnodes = 2: 3 ranks (stages x replicas) cannot be shared evenly" in said
    code, said = doctor(run_file, "--nnodes", "3")
    assert code == 2
    assert "--nnodes = 3: say where they meet: --rdzv host0:29500" in said
    assert time.monotonic() - start_s < 60


def test_memory_is_counted_with_what_is_counted(run_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "net.json"
    _, said = doctor(run_file, "--rdzv", f"127.0.0.1:{free_port()}", "--save", str(saved))
    assert "GB of memory free; weights, gradients and Adam and AQ-SGD's memories need 0." in said
    assert f"written: {saved}, {saved.with_suffix('.png')}" in said
    _, said = doctor(
        run_file, "--rdzv", f"127.0.0.1:{free_port()}", "--set", "data.train_sequences=all"
    )
    assert '(not AQ-SGD\'s memories, as data.train_sequences = "all") need 0.0' in said
