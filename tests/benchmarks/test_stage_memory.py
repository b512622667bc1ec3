from pathlib import Path

import pytest

from benchmarks.stage_memory import main


def test_a_stage_is_measured_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", str(Path("examples/models/gpt2")), "--stages", "4", "--only", "1"])
    floor, stage = capsys.readouterr().out.splitlines()[1:]
    assert floor.split()[:2] == ["none", "0"]
    name, parameters, megabytes, peak_mb, _ = stage.split()
    assert name == "1"
    assert float(parameters.replace(",", "")) * 4 / 1e6 == pytest.approx(float(megabytes), abs=0.1)
    assert float(peak_mb) > float(megabytes)
