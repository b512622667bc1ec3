"""The parity benchmark on models of toy size: what it compares, its table and picture."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.finetuning import Scale, pretrain
from benchmarks.harness import Records, Row, read_results, with_gaps
from benchmarks.replicas.cost import cpu_ns
from benchmarks.replicas.parity import (
    BASELINE,
    LOSSES,
    METHOD_LABELS,
    METHODS,
    Case,
    compare,
    draw,
    run_case,
)
from benchmarks.replicas.settings import GPT2, Setting, read_corpus, shortened
from benchmarks.replicas.training import Method, train
from tests.often import mostly_slow

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
    assert plain.numbers["x fp32 ring"] == pytest.approx(1.0, abs=0.1)  # headers alone
    assert 0.9 < cocktail.numbers["x fp32 ring"] < 3  # what does not move: zstd finds that
    assert {plain.numbers[f"{name} gap"] for name in LOSSES} == {0}
    assert cocktail.numbers["tuned text gap"] == pytest.approx(0, abs=0.05)
    assert [Row(**line) for line in read_results(path)] == [plain, cocktail]
    first, last = plain.detail["epochs"]
    assert last["tuned"] < first["local"]


_FIRST = [*{method.name: method for method in reversed(METHODS)}.values()]


@pytest.mark.parametrize("method", mostly_slow(METHODS, _FIRST.__contains__), ids=METHOD_LABELS)
def test_every_method_trains(method: Method, texts: tuple[Path, ...]) -> None:
    base = pretrained(SUBWORDS, texts)
    row = run_case(Case(SUBWORDS, texts, base, method, 2, 1e-3, 0))
    assert row.numbers["held out"] < 5  # a uniform guess of 300: 5.7
    assert row.numbers["tuned text"] is None
    assert row.numbers["x fp32 ring"] > 0
    assert row.conditions == {"replicas": 2, "lr": 1e-3}


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
    assert shortened(GPT2, 0.25).scale.sequences == scale.sequences // 4


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


def test_the_picture_has_a_mark_for_each_run(tmp_path: Path) -> None:
    rows = list[Row]()
    for seed in (0, 1, 2):
        for method, gap in ((BASELINE, 0), ("x", 0.25)):
            numbers = {"x fp32 ring": 100.0, "held out": 3.0 + seed * gap}
            rows.append(with_gaps(Row(method, numbers, seed=seed), rows, BASELINE, ["held out"]))
    draw(rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
