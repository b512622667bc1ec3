"""What is recommended can be put into the run file, and then trains as foretold."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.launch.test_train import run_file, thinpipe
from thinpipe.launch.cli import app
from thinpipe.launch.config.run import load_config
from thinpipe.launch.plan.predict import measure_messages
from thinpipe.launch.report.metrics import read_metrics

__all__ = ["run_file"]


@pytest.mark.dist
def test_coded_settings_are_applied_and_weigh_what_was_foretold(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two on busy cores wait for each other
    monkeypatch.setenv("COLUMNS", "100")
    text = run_file.read_text().replace("width = 16", "width = 64")
    text = text.replace("batch_size = 5", "batch_size = 6").replace("bits = 3", "bits = 8")
    run_file.write_text(text + "[[boundary]]\ncut = 3\nguard = { mode = 'act' }\n")
    done = CliRunner().invoke(app, ["plan", str(run_file), "--rate", "100kbit", "--apply"])
    assert done.exit_code == 0, done.output
    for method in ("aqsgd rate 0.8", "direct rate 0.7"):
        assert method in done.output
    _, _, told = done.output.partition("--apply does:\n")
    applied = tomllib.loads(run_file.read_text())["boundary"]
    assert tomllib.loads(told.partition("\nwritten to")[0])["boundary"] == applied
    run = load_config(run_file)
    assert run.boundary_at(3).guard.mode == "act"
    trained = thinpipe(run_file)
    assert trained.returncode == 0, trained.stderr
    foretold = measure_messages(run)
    last = read_metrics(run_file.parent / "run" / "metrics.jsonl")[-1]
    for wire in last.wire:
        nbytes = foretold[wire.cut, wire.direction].nbytes
        assert wire.bytes / wire.messages == pytest.approx(nbytes, rel=0.05)
