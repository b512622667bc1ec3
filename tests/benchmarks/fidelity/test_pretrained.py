"""The benchmark on a pretrained model, at toy size: its rows, and that it goes on where it was."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fidelity.pretrained import METHODS, main
from benchmarks.harness import write_tokenizer
from tests.huggingface import saved_model
from tests.texts import write_words

KEYS = {
    *("method", "seed", "lr", "cuts", "ratio_fp32", "ratio_fp32_run"),
    *("train_gap", "held_out_gap", "held_out_compressed_gap"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_words(tmp_path, 1500)
    saved_model("llama", tmp_path / "model", vocab_size=270)
    write_tokenizer(tmp_path / "model", tmp_path / "train", vocab=270)
    return tmp_path


def rows(folder: Path, *methods: str, more: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    sizes = ("--epochs", "2", "--sequences", "16", "--held-out", "4", "--tokens", "16")
    main(
        [
            *("--model", str(folder / "model"), "--train", str(folder / "train")),
            *("--eval", str(folder / "eval"), "--json", str(folder / "rows.jsonl")),
            *("--methods", *methods, "--seeds", "1", "--cuts", "1", *sizes, *more),
        ]
    )
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["result"] for line in lines]


@pytest.mark.slow
def test_rows_have_gaps_and_are_measured_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, coded = rows(folder, "stateless 5/4")
    assert set(coded) >= KEYS
    assert (base["method"], base["train_gap"]) == ("fp32", 0.0)
    assert base["ratio_fp32"] == pytest.approx(1.0, abs=0.02)  # headers
    assert coded["train_gap"] == coded["epoch_losses"][1] - base["epoch_losses"][1] != 0
    assert 4 < coded["ratio_fp32"] < 7.2
    again = rows(folder, "stateless 5/4", "once .05/.3")
    assert again[:2] == [base, coded]
    assert [row["method"] for row in again[2:]] == ["once .05/.3"]
    assert "stateless 5/4" in capsys.readouterr().out.split("once .05/.3, seed 0")[-1]
    other = rows(folder, "weights bf16", more=("--lora", "2"))
    assert [(row["method"], row["lora"]) for row in other[3:]] == [("fp32", 2), ("weights bf16", 2)]
    assert 0 != other[-1]["held_out_gap"] == pytest.approx(0, abs=0.05)


def test_methods_are_settings_of_both_directions() -> None:
    assert all(set(boundary) == {"forward", "backward"} for boundary in METHODS.values())
