import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.stage_memory import main, measure, write_weights
from thinpipe.pipeline.models.hf.shards import Shards

MODEL = Path("examples/models/gpt2")


@pytest.mark.slow
def test_a_stage_is_measured_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", str(MODEL), "--stages", "4", "--only", "1"])
    floor, stage = capsys.readouterr().out.splitlines()[1:]
    assert floor.split()[:2] == ["none", "0"]
    name, parameters, megabytes, peak_mb, files, _ = stage.split()
    assert (name, files) == ("1", "0")
    assert float(parameters.replace(",", "")) * 4 / 1e6 == pytest.approx(float(megabytes), abs=0.1)
    assert float(peak_mb) > float(megabytes)


def test_why_a_stage_could_not_be_measured_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(subprocess.CalledProcessError):
        main(["--model", str(tmp_path), "--only", "1"])
    assert f"{tmp_path / 'config.json'}: " in capfd.readouterr().err


def test_a_stage_reads_only_shards_with_its_blocks(tmp_path: Path) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    write_weights(tmp_path, shard_nbytes=300_000)
    files = Shards(tmp_path).files
    own = {file for name, file in files.items() if ".h.4." in name or ".h.5." in name}
    assert 1 < len(own) < len(set(files.values()))
    assert measure(tmp_path, 2, 6)["files"] == len(own)
