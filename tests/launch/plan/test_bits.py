"""Recommended settings can be applied to the run file, and training sends what was predicted."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.launch.test_train import run_file, thinpipe
from thinpipe.launch.cli import app
from thinpipe.launch.config.run import load_config
from thinpipe.launch.cuts.message_cost import measure_messages
from thinpipe.launch.view.report.metrics import read_metrics

__all__ = ["run_file"]


@pytest.mark.slow
@pytest.mark.dist
def test_recommended_settings_are_applied_and_have_the_predicted_sizes(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two compete on a busy machine
    monkeypatch.setattr("thinpipe.launch.cuts.profile.interference_warning", lambda *_, **__: None)
    monkeypatch.setenv("COLUMNS", "100")
    text = run_file.read_text(encoding="utf-8").replace("width = 16", "width = 64")
    text = text.replace("batch_size = 5", "batch_size = 6").replace("bits = 3", "bits = 8")
    run_file.write_text(text + "[[boundary]]\ncut = 3\nguard = { mode = 'off' }\n")
    done = CliRunner().invoke(app, ["plan", str(run_file), "--rate", "100kbit", "--apply"])
    assert done.exit_code == 0, done.output
    for method in ("aqsgd 2-bit", "stateless 3-bit"):
        assert method in done.output
    _, _, printed = done.output.partition("to the run file:\n")
    applied = tomllib.loads(run_file.read_text(encoding="utf-8"))["boundary"]
    assert tomllib.loads(printed.partition("\nwritten to")[0])["boundary"] == applied
    run = load_config(run_file)
    assert run.boundary_at(3).guard.mode == "off"
    trained = thinpipe(run_file)
    assert trained.returncode == 0, trained.stderr
    predicted = measure_messages(run)
    last = read_metrics(run_file.parent / "run" / "metrics.jsonl")[-1]
    for wire in last.wire:
        nbytes = predicted[wire.cut, wire.direction].nbytes
        assert wire.nbytes / wire.messages == pytest.approx(nbytes, rel=0.05)
