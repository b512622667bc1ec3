"""How many samples large data are thought to give, beside how many they do."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinpipe.launch.data import estimate as module
from thinpipe.launch.data.classification import Labelling
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.estimate import estimate
from thinpipe.launch.data.load import load
from thinpipe.launch.data.reading import records

TEXTS = [f"text {number} " * (20 + number % 7) for number in range(1000)]


def _text(folder: Path) -> dict[str, Any]:
    (folder / "a.txt").write_text("\n".join(TEXTS))
    return {"path": str(folder / "a.txt")}


def _jsonl(folder: Path) -> dict[str, Any]:
    rows = [{"text": text, "other": "x" * 100} for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(folder / "a.jsonl"), "text_field": "text"}


def _csv(folder: Path) -> dict[str, Any]:
    (folder / "a.csv").write_text("text,other\n" + "".join(f"{t},{'x' * 100}\n" for t in TEXTS))
    return {"path": str(folder / "a.csv"), "text_field": "text"}


def _parquet(folder: Path) -> dict[str, Any]:
    images = [bytes([number % 256]) * 5000 for number in range(len(TEXTS))]
    pq.write_table(pa.table({"text": TEXTS, "image": images}), folder / "a.parquet")
    return {"path": str(folder / "a.parquet"), "text_field": "text"}


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test can write is large."""
    monkeypatch.setattr(module, "_LARGE_NBYTES", 50_000)
    monkeypatch.setattr(module, "_HEAD_NBYTES", 25_000)


def _estimate(**settings: Any) -> Any:
    """The estimate, and the settings that it is of."""
    sizes = {"sequence_length": 64, "train_sequences": "all", "eval_sequences": 4}
    config = DataConfig.model_validate({**sizes, **settings})
    return estimate(config, seed=0, labelling=Labelling()), config


@pytest.mark.parametrize("make", [_text, _jsonl, _csv, _parquet])
def test_an_estimate_is_near_the_count(tmp_path: Path, make: Any) -> None:
    found, config = _estimate(**make(tmp_path))
    assert any("estimated from the beginning" in note for note in found[0].notes)
    training, held_out = load(config)
    assert len(found[0]) == pytest.approx(len(training), rel=0.15)
    assert len(found[1]) == len(held_out) == 4


def test_a_mixture_ends_with_the_source_that_is_shortest_for_its_weight(tmp_path: Path) -> None:
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("\n".join(TEXTS * 3))
    short.write_text("\n".join(TEXTS))
    found, config = _estimate(
        sources=[{"path": str(long), "weight": 1}, {"path": str(short), "weight": 2}]
    )
    assert len(found[0]) == pytest.approx(len(load(config)[0]), rel=0.15)
    quoted = [note.partition(" = ")[0] for note in found[0].notes]
    assert quoted == ["note: data.sources.0.path", "note: data.sources.1.path"]


@pytest.mark.parametrize("make", [_csv, _parquet])
def test_a_field_that_is_not_there_is_named(tmp_path: Path, make: Any) -> None:
    with pytest.raises(ValueError, match="no field 'txet' among"):
        _estimate(**make(tmp_path) | {"text_field": "txet"})


def test_columns_that_are_not_used_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be images."""
    asked = list[str]()
    typed = records._typed

    def noted(form: Any, wanted: Any) -> Any:
        asked.extend(wanted)
        return typed(form, wanted)

    monkeypatch.setattr(records, "_typed", noted)
    assert _estimate(**_parquet(tmp_path))[0] is not None
    assert {*asked} == {"text"}


def test_small_data_and_streams_are_not_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _jsonl(tmp_path)
    assert _estimate(**rows, stream_block=8)[0] is None
    monkeypatch.setattr(module, "_LARGE_NBYTES", 100_000_000)
    assert _estimate(**rows)[0] is None
