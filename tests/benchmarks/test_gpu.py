"""`make gpu` where there is no GPU: it says so, and a rehearsal goes through all of it."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.memory import CASES, run_config
from benchmarks.gpu.runs import LOOPBACK, SHAPED, Shape, apart
from benchmarks.harness import Row, read_results
from thinpipe.launch.config.run import load_config


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "torch finds no GPU here; --rehearse runs the same on the CPU" in capsys.readouterr().err


@pytest.mark.slow
def test_a_part_that_fails_is_named_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = LOOPBACK[0]
    monkeypatch.setitem(gpu.PARTS, "memory", lambda work: 1 // 0)  # type: ignore[arg-type]
    monkeypatch.setitem(gpu.PARTS, "loopback", lambda work: gpu.runs(work, cases=[case], part="x"))
    page, json = tmp_path / "page.md", tmp_path / "rows.jsonl"
    options = ["--rehearse", "--parts", "memory", "loopback", "--page", str(page)]
    assert gpu.main([*options, "--json", str(json)]) == 1
    text = page.read_text(encoding="utf-8")
    assert "**Failed**: ZeroDivisionError" in text
    assert f"| {case.name} " in text
    (row,) = read_results(json)
    assert len(row["detail"]["losses"]) == 6


def test_what_is_late_is_left_out_by_name(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    options = ["--rehearse", "--minutes", "0.01", "--parts", "shaped", "--page", str(page)]
    assert gpu.main(options) == 0
    assert page.read_text(encoding="utf-8").count("left out: the time was up") == len(SHAPED)


def test_every_run_has_settings_that_hold(tmp_path: Path) -> None:
    for case in (*LOOPBACK, *SHAPED):
        (tmp_path / "run.toml").write_text(Shape().run_file(case, "cuda"), encoding="utf-8")
        assert load_config(tmp_path / "run.toml").pipeline.stages == case.stages
    for name in CASES:
        assert run_config(name, 2, 64, "cuda").pipeline.stages == 1


def test_losses_that_lie_apart_are_seen() -> None:
    given = {"a": [1, 2], "b": [1, 2.5]}
    rows = {name: Row(name, {}, detail={"losses": found}) for name, found in given.items()}
    assert apart(rows, "a", "b") == 0.5
