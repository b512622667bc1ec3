"""What one host finds out by itself, and before it waits for others."""

import re
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


def counted(run_file: Path, *settings: str) -> tuple[int, str, str]:
    """Exit code, GB of memory that are needed, and all that was said."""
    words = [word for setting in settings for word in ("--set", setting)]
    code, said = doctor(run_file, "--rdzv", f"127.0.0.1:{free_port()}", *words)
    found = re.search(r"and AQ-SGD's memories need (\S+) GB", said)
    return code, found[1] if found else "", said


def test_memories_of_all_samples_are_counted_by_reading_the_data(
    run_file: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(20_000)))
    data = (f"data.path={text}", "data.sequence_length=64")
    sequences = (len(text.read_bytes()) * 9 // 10 - 1) // 64
    code, need, _ = counted(run_file, *data, f"data.train_sequences={sequences}")
    assert code == 0
    assert counted(run_file, *data, "data.train_sequences=all")[:2] == (0, need)
    text.unlink()
    code, need, said = counted(run_file, *data, "data.train_sequences=all")
    assert (code, need) == (1, "")
    assert f"data.path = '{text}': no such file or folder" in said
