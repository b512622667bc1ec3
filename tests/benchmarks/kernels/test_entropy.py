"""The entropy coder's benchmark on few values."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.entropy import drawn, main


def test_bits_are_near_the_entropy_and_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.jsonl"
    main(["--values", "20000", "--repetitions", "1", "--json", str(path)])
    rows = [json.loads(line)["result"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["symbols"] for row in rows][-1] == "models 4 to 25"
    for row in rows:
        assert row["entropy"] < row["rans_bits"] < 1.1 * row["entropy"]
        assert row["zstd_bits"] is None or row["zstd_bits"] > 0.99 * row["entropy"]
    assert capsys.readouterr().out.count("20,000") == len(rows) == 5


def test_symbols_are_those_of_their_models() -> None:
    symbol_N, model_N = drawn((4, 25), 5000)
    assert int(model_N.min()) == 4
    assert int(model_N.max()) == 25
    wide = torch.tensor([float((symbol_N[model_N == m] != 16).float().mean()) for m in (6, 24)])
    assert float(wide[0]) < 0.1 < 0.8 < float(wide[1])
