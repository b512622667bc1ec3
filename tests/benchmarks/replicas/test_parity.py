"""The parity benchmark on models of toy size: what it compares, its table and picture."""

import json
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.finetuning import Scale, pretrain
from benchmarks.harness import Records
from benchmarks.replicas.cost import cpu_ns
from benchmarks.replicas.parity import (
    BASELINE,
    METHOD_LABELS,
    METHODS,
    Case,
    Row,
    chosen_methods,
    compare,
    draw,
    run_case,
    table,
)
from benchmarks.replicas.settings import GPT2, Setting, quick, read_corpus
from benchmarks.replicas.training import Method, train

TINY = Scale(
    layers=2,
    width=16,
    heads=2,
    tokens=16,
    pretrain_steps=60,
    pretrain_batch=8,
    sequences=24,
    epochs=2,
    batch=8,
    held_out=8,
)
TUNED = Setting("tuned", TINY)
SUBWORDS = Setting("subwords", replace(TINY, vocab=300), evaluate_tuned=False, bf16=True)


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, ...]:
    words = ["thin ", "pipe ", "sends ", "few ", "bytes ", "over ", "slow ", "links\n"]
    for name, seed in (("train", 1), ("tune", 2)):
        text = "".join(random.Random(seed).choices(words, k=1500))
        (tmp_path / name).write_text(text)
    return tmp_path / "train", tmp_path / "tune"


def pretrained(setting: Setting, texts: tuple[Path, ...]) -> Path:
    """A file of weights."""
    base = texts[0].with_name("base.pt")
    torch.save(pretrain(read_corpus(setting, texts), setting.scale, seed=0), base)
    return base


@pytest.mark.slow
def test_exact_averages_of_parameters_and_of_gradients_both_learn(
    texts: tuple[Path, ...], tmp_path: Path
) -> None:
    exact = {"subset": 1.0, "topk": 1.0, "bits": 32, "delayed": False}
    methods = [METHODS[0], Method("cocktail exact", "cocktail", exact)]
    path = tmp_path / "out.jsonl"
    case = Case(TUNED, texts, pretrained(TUNED, texts), METHODS[0], 2, 5e-4, 0)
    plain, cocktail = compare([case], methods, jobs=1, records=Records(path))
    assert plain.ratio_fp32 == pytest.approx(1.0, abs=0.1)  # headers alone
    assert 0.9 < cocktail.ratio_fp32 < 3  # what does not occur does not move: zstd finds that
    assert plain.held_out_gap == plain.train_gap == plain.tuned_gap == 0
    assert cocktail.tuned_gap == pytest.approx(0, abs=0.05)
    lines = [json.loads(line)["result"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["method"] for line in lines] == [BASELINE, "cocktail exact"]
    assert {field.name for field in fields(Row)} < set(lines[0])
    first, last = lines[0]["outcome"]["epochs"]
    assert last["tuned"] < first["local"]


@pytest.mark.parametrize("method", METHODS, ids=METHOD_LABELS)
def test_every_method_trains(method: Method, texts: tuple[Path, ...]) -> None:
    base = pretrained(SUBWORDS, texts)
    outcome = run_case(Case(SUBWORDS, texts, base, method, 2, 1e-3, 0))
    assert outcome.epochs[-1].held_out < 5  # a uniform guess of 300: 5.7
    assert outcome.epochs[-1].tuned is None
    assert outcome.ratio > 0
    assert outcome.lr == 1e-3 * method.rate


def test_methods_are_compared_with_exact_averages_whatever_was_asked_for() -> None:
    labels = [method.label for method in chosen_methods(["quantize 1 bit"])]
    assert labels == [BASELINE, "quantize 1 bit"]
    assert [method.label for method in chosen_methods(None)] == list(METHOD_LABELS)


def test_a_loss_that_is_not_finite_ends_the_comparison(texts: tuple[Path, ...]) -> None:
    """Logits of +-2.4e38 whatever is read: where a target's is the low one, the loss overflows."""
    corpus = read_corpus(TUNED, texts)
    weights = dict(pretrain(corpus, replace(TINY, pretrain_steps=1), seed=0))
    weights["final_norm.weight"] = torch.zeros(TINY.width)
    weights["final_norm.bias"] = torch.ones(TINY.width)
    sign = 1.0 - 2.0 * (torch.arange(TINY.vocab) % 2).unsqueeze(1)
    weights["head.weight"] = (1.5e37 * sign).repeat(1, TINY.width)
    with pytest.raises(RuntimeError, match="all-reduce fp32, epoch 1: the loss is not finite"):
        train(corpus, METHODS[0], TUNED, replicas=2, weights=weights, seed=0)


def test_the_large_model_is_as_large_as_it_says() -> None:
    scale = GPT2.scale
    per_layer = 12 * scale.width**2
    assert scale.layers * per_layer + 2 * scale.vocab * scale.width > 11e6
    assert quick(GPT2).scale.sequences == scale.sequences // 4


def test_texts_of_a_wrong_number_are_refused(texts: tuple[Path, ...]) -> None:
    with pytest.raises(ValueError, match="1 texts: name two"):
        read_corpus(TUNED, texts[:1])


def test_processor_time_is_counted_once_per_parameter_and_step() -> None:
    """Top-k of all parameters costs more than none, and neither microseconds."""
    none, topk = (cpu_ns(Method(name, name, {}), 2) for name in ("none", "topk"))
    assert 0 <= none < topk < 1000


def test_processor_time_of_a_method_that_follows_its_optimizer() -> None:
    (ahead,) = (method for method in METHODS if method.label == "DeMo k 32, look-ahead")
    assert cpu_ns(ahead, 2) > 0


def row(method: str, seed: int, gap: float) -> Row:
    return Row(method, 4, 1e-3, seed, 100.0, 50.0, 3.0 + gap, gap, gap, None, 8.0, 5.0)


def test_the_table_has_medians_and_ranges(tmp_path: Path) -> None:
    rows = [row(m, s, s * d) for s in (0, 1, 2) for m, d in ((BASELINE, 0), ("x", 0.25))]
    cells = [cell.strip() for cell in table(rows).splitlines()[-1].split("|")[1:-1]]
    assert cells[:5] == ["x", "4", "0.001", "100.0x", "50.0x"]
    assert cells[5:9] == ["3.2500", *["+0.2500 (+0.0000 to +0.5000)"] * 2, "-"]
    draw(rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
