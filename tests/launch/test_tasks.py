"""The bundled examples of classification and instruction data, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run
from thinpipe.launch.config.run import RunConfig, load_config
from thinpipe.launch.corpus import check_data
from thinpipe.launch.view.report.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CLASSIFICATION = ROOT / "examples/classification.toml"
INSTRUCTIONS = ROOT / "examples/instructions.toml"


def _train(example: Path, folder: Path, *settings: str) -> str:
    arguments = [part for setting in settings for part in ("--set", setting)]
    return run("train", example, "--set", f"run.folder={folder}", *arguments).stdout


@pytest.mark.slow
@pytest.mark.dist
def test_classification_learns_and_reports_accuracy(tmp_path: Path) -> None:
    said = _train(CLASSIFICATION, tmp_path, "train.epochs=5", "train.decay=none")
    assert "smp/s" in said
    assert "evaluation: accuracy " in said
    assert "warning" not in said
    evaluation = read_metrics(tmp_path / "metrics.jsonl")[-1].eval
    assert evaluation is not None
    assert set(evaluation) == {
        *("loss", "accuracy", "matthews"),
        *("loss_compressed", "accuracy_compressed", "matthews_compressed"),
    }
    assert evaluation["accuracy"] > 0.6
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["unit"] == "sample"
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Evaluation accuracy" in report
    assert "Samples per second" in report


@pytest.mark.slow
@pytest.mark.dist
def test_instructions_lower_the_loss_of_responses(tmp_path: Path) -> None:
    repeated = ("model.dropout=0.1", 'model.dropout_masks="repeated"')
    assert "tok/s" in _train(INSTRUCTIONS, tmp_path, "train.epochs=4", *repeated)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[-1].loss < records[0].loss - 0.5


def _config(example: Path, *overrides: str) -> RunConfig:
    return load_config(example, overrides)


def test_replicas_and_packing_share_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    first, second = (check_data(_config(INSTRUCTIONS)).digests for _ in range(2))
    assert first == second
    assert first != check_data(_config(INSTRUCTIONS, "run.seed=1")).digests


@pytest.mark.parametrize(
    ("example", "override", "message"),
    [
        (CLASSIFICATION, "model.classes=3", r"data.labels = .*: 2 names for model.classes = 3"),
        (INSTRUCTIONS, "model.classes=3", r"classes = 3: a language model has no classes"),
        (CLASSIFICATION, 'model.tie_embeddings="exact"', r"no row per token; use \"untied\""),
    ],
)
def test_task_and_data_must_agree(example: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(example, override)


def test_a_task_without_its_data_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\ntask = "classification"\nclasses = 2')
    with pytest.raises(ValueError, match=r'task = "classification", data.label_field = None: cl'):
        load_config(path)
    path.write_text('[model]\ntask = "classification"')
    with pytest.raises(ValueError, match=r"the number of labels is missing; set classes"):
        load_config(path)


def test_places_on_a_disk_are_not_compared_between_peers() -> None:
    reported: Any = _config(
        INSTRUCTIONS, "data.eval_path=/mnt/a.jsonl", "data.tokenizer=/mnt/words"
    ).shared()
    assert "/mnt" not in json.dumps(reported)
