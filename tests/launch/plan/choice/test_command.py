"""`thinpipe plan --place`: prints, draws and writes a choice that a run accepts."""

import json
from pathlib import Path

import pytest

from tests.invoking import invoke
from thinpipe.launch.config.run import load_config

RUN = """[model]
layers = 4
width = 64
heads = 4
[data]
sequence_length = 32
[pipeline]
cuts = [2] # by hand
microbatches = 4
schedule = "1F1B"
device = "cpu"
[train]
batch_size = 16
epochs = 3
[gradcomp]
method = "cocktail"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ['"1F1B"', '"LoopedBFS"\nranks = 1', '"Deep1F1B"\nranks = 2\ndepth = 4']
)
def test_what_is_applied_is_a_valid_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    monkeypatch.setattr("thinpipe.launch.cuts.profile.interference_warning", lambda *_, **__: None)
    run, net = tmp_path / "run.toml", tmp_path / "net.json"
    run.write_text(RUN.replace('"1F1B"', schedule))
    regions = {"regions": {"Ohio": 2, "Tokyo": 2}, "inside": {"latency_ms": 1, "gbps": 1}}
    net.write_text(json.dumps(regions | {"links": [["Ohio", "Tokyo", 60, 0.05]]}))
    options = ("--place", "--apply", "--seconds", 1)
    code, output = invoke("plan", run, "--network", net, *options)
    assert code == 0, output
    assert "predicted step" in output
    written = load_config(run, [])
    assert "# by hand" in run.read_text(encoding="utf-8")
    pipeline = written.pipeline
    assert len(pipeline.placement) == pipeline.replicas
    used = {host for row in pipeline.placement for host in row}
    assert used <= {"Ohio-0", "Ohio-1", "Tokyo-0", "Tokyo-1"}
    if pipeline.replicas > 1:
        assert f"exchange: {written.method}" in output
    for spec in written.specs.values():
        assert spec.words() in output


def test_seconds_without_place_are_rejected(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    code, output = invoke("plan", run, "--seconds", 5)
    assert code == 2
    assert "--seconds = 5: is for --place" in output
