"""Text classifiers from rows of a file to transformers: pairs, several labels, numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.single_process import in_process
from tests.huggingface import saved_model, section
from tests.launch.trained.test_export_hf import run_config, saved_run
from tests.wordpieces import save_wordpieces
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.corpus import check_data
from thinpipe.launch.trained.export_hf import export
from thinpipe.pipeline.batch import IGNORED_TARGET, Batch
from thinpipe.pipeline.metrics import Measures, named_metrics
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.hf.self_check import check_step

WORDS = [f"w{number}" for number in range(40)]
LENGTH = 12


def rows_of(label: Any) -> list[dict[str, Any]]:
    """Pairs of unlike lengths, some longer than a sequence, and what `label` gives each."""
    rows = []
    for number in range(24):
        first = " ".join(WORDS[(number + i) % 40] for i in range(1 + number % 13))
        second = " ".join(WORDS[(3 * number + i) % 40] for i in range(1 + number % 7))
        rows.append({"a": first, "b": second, "label": label(number)})
    return rows


def run_of(folder: Path, name: str, label: Any, **model: Any) -> RunConfig:
    """A run on such pairs, of a tiny model with a tokenizer of its own."""
    source = folder / "source"
    one_type = {"type_vocab_size": 1} if name == "roberta" else {}  # as all that are published
    saved_model(name, source, num_labels=model["classes"], **one_type)
    save_wordpieces(source, WORDS)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of(label)))
    fields = {"text_field": "a", "pair_field": "b", "label_field": "label"}
    run = run_config(section(name, source, **model), folder / "run", (3,))
    places = {"path": str(file), "eval_path": str(file), "tokenizer": str(source)}
    sizes = {"sequence_length": LENGTH, "train_sequences": "all", "eval_sequences": "all"}
    return run.updated(data={**fields, **places, **sizes})


def whole_batch(run: RunConfig) -> Batch:
    samples = check_data(run).train
    return samples.batch(range(len(samples)))


def pipeline_logits(run: RunConfig, folder: Path, batch: Batch) -> Tensor:
    """Of stages that start from an exported folder."""
    model = {**run.model.model_dump(exclude_none=True), "pretrained": str(folder)}
    x: Tensor = batch.inputs_BT
    with in_process(run.updated(model=model), total_steps=1) as built, torch.no_grad():
        for stage in built.stages:
            module: Any = stage.submod
            x = module.eval()(x, batch.samples)
    return x


def transformers_output(
    folder: Path, rows: list[dict[str, Any]], labels: Tensor, **inputs: Any
) -> Any:
    """What a user of the exported folder computes, with that library's tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    sizes = {"truncation": "longest_first", "max_length": LENGTH, "padding": "max_length"}
    texts = ([row[name] for row in rows] for name in ("a", "b"))
    tokens = tokenizer(*texts, **sizes, return_tensors="pt", **inputs)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return tokens, model.eval()(**tokens, labels=labels)


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(n, marks=pytest.mark.slow) for n in ("electra", "roberta"))]
)
def test_pairs_are_cut_and_typed_as_transformers_does(name: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, name, lambda number: number % 3, classes=3)
    run = run.updated(data={**run.data.model_dump(exclude_none=True), "labels": ("0", "1", "2")})
    batch = whole_batch(run)
    typed = name != "roberta"  # which has one type
    saved_run(run, steps=1)
    export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    rows = rows_of(lambda number: number % 3)
    tokens, found = transformers_output(
        tmp_path / "out", rows, batch.targets, return_token_type_ids=typed
    )
    assert batch.mask_BT is not None
    assert torch.equal(tokens["input_ids"], batch.inputs_BT)
    assert torch.equal(tokens["attention_mask"].bool(), batch.mask_BT)
    if typed:
        assert batch.types_BT is not None
        assert torch.equal(tokens["token_type_ids"], batch.types_BT.long())
        assert torch.equal((batch.inputs_BT == 3).sum(1), torch.full((len(rows),), 2))  # [SEP]
    else:
        assert batch.types_BT is None
    facts = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert facts["id2label"] == {"0": "0", "1": "1", "2": "2"}
    logits = pipeline_logits(run, tmp_path / "out", batch)
    torch.testing.assert_close(logits, found.logits, atol=2e-6, rtol=1e-5)
    assert isinstance(run.model, HuggingFaceConfig)
    check_step(run.model)


@pytest.mark.parametrize(
    ("label", "model", "metrics"),
    [
        (
            lambda number: [i for i in range(3) if number >> i & 1],
            {"classes": 3, "problem_type": "multi_label_classification"},
            {"accuracy", "f1"},
        ),
        (lambda number: number / 5 - 2, {"classes": 1}, {"pearson", "spearman"}),
        pytest.param(
            lambda number: [number / 9, 1.5],
            {"classes": 2, "problem_type": "regression"},
            {"pearson", "spearman"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_are_those_of_transformers(
    label: Any, model: dict[str, Any], metrics: set[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path, "bert", label, **model)
    batch = whole_batch(run)
    assert batch.targets.shape == (24, model["classes"])
    objective = run.model.objective()
    losses = []
    with in_process(run.updated(train={**dict(run.train), "lr": 3e-3}), total_steps=9) as built:
        for number in range(6):
            losses.append(built.engine.train_step(batch, number).loss)
        assert built.engine.train_step(batch, 9).tokens == objective.count(batch.targets)
    assert losses[-1] < losses[0]
    saved_run(run, steps=0)
    export(tmp_path / "run", tmp_path / "out", step=None, dtype="source")
    facts = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert facts["problem_type"] == model.get("problem_type", "regression")
    _, found = transformers_output(
        tmp_path / "out", rows_of(label), batch.targets, return_token_type_ids=True
    )
    logits = pipeline_logits(run, tmp_path / "out", batch)
    mean = objective.loss_sum(logits, batch.targets) / objective.count(batch.targets)
    assert float(mean) == pytest.approx(float(found.loss), rel=1e-5)
    half = batch.counting(10)
    assert (half.targets[10:] == IGNORED_TARGET).all()
    assert objective.count(half.targets) == 10 * model["classes"]
    expected = objective.loss_sum(logits[:10], batch.targets[:10])
    torch.testing.assert_close(objective.loss_sum(logits, half.targets), expected)
    measures = Measures(named_metrics(objective.metrics))
    measures.add(logits, half.targets)
    assert measures.values([measures.packed()]).keys() == metrics


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"classes": 1, "problem_type": "single_label_classification"}, r"one class tells nothing"),
        ({"classes": 3}, r"config.json says 'regression'; set problem_type"),
        ({"task": "language", "classes": None, "problem_type": "regression"}, r"made for task"),
    ],
)
def test_settings_of_a_head_that_contradict_each_other_are_rejected(
    choices: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved_model("bert", tmp_path, num_labels=1, problem_type="regression")
    with pytest.raises(ValueError, match=message):
        HuggingFaceConfig(**section("bert", tmp_path) | choices)
    fits = HuggingFaceConfig(**section("bert", tmp_path) | {"classes": 1})
    assert fits.problem == "regression"
