"""The parity benchmark on models of toy size: what it compares."""

from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.finetuning import Corpus, Scale, Weights, pretrain
from benchmarks.harness import Records, Row, read_results
from benchmarks.replicas.parity import BASELINE, LOSSES, METHOD_LABELS, METHODS, Case, compare
from benchmarks.replicas.settings import GPT2, read_corpus, shortened
from benchmarks.replicas.training import Method, train
from tests.often import mostly_slow
from tests.texts import write_words
from thinpipe.gradcomp.registry import parse_options

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
    vocab=300,
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return write_words(tmp_path_factory.mktemp("texts"), 1500)


@pytest.fixture(scope="module")
def subwords(texts: tuple[Path, ...]) -> tuple[Corpus, Weights]:
    """A corpus of subwords, and a model of it."""
    torch.set_num_threads(1)
    corpus = read_corpus(TINY, texts)
    return corpus, pretrain(corpus, TINY, seed=0)


@pytest.mark.slow
def test_exact_averages_of_parameters_and_of_gradients_both_learn(
    texts: tuple[Path, ...], subwords: tuple[Corpus, Weights], tmp_path: Path
) -> None:
    exact = {"subset": 1.0, "topk": 1.0, "bits": 32, "delayed": False}
    methods = [METHODS[0], Method("cocktail exact", "cocktail", exact)]
    path = tmp_path / "out.jsonl"
    base = tmp_path / "base.pt"
    torch.save(subwords[1], base)
    case = Case(TINY, texts, base, METHODS[0], 2, 5e-4, 0)
    plain, cocktail = compare([case], methods, jobs=1, records=Records(path))
    assert plain.numbers["x fp32 ring"] == pytest.approx(1.0, abs=0.1)  # headers alone
    assert 0.9 < cocktail.numbers["x fp32 ring"] < 3  # what does not move: zstd finds that
    assert {plain.numbers[f"{name} gap"] for name in LOSSES} == {0}
    assert cocktail.numbers["held out gap"] == pytest.approx(0, abs=0.05)
    assert [Row(**line) for line in read_results(path)] == [plain, cocktail]
    assert plain.numbers["last quarter"] < plain.detail["losses"][0]


OFTEN = (BASELINE, "DeMo k 24", "streaming DiLoCo H 30, 4 bits", "ef_gradients .015, Muon")


@pytest.mark.parametrize("label", mostly_slow(METHOD_LABELS, OFTEN.__contains__))
def test_every_method_trains(label: str, subwords: tuple[Corpus, Weights]) -> None:
    (method,) = (method for method in METHODS if method.label == label)
    corpus, weights = subwords
    row = train(corpus, method, TINY, replicas=2, weights=weights, seed=0)
    assert row.numbers["held out"] < 5  # a uniform guess of 300: 5.7
    assert row.numbers["x fp32 ring"] > 0
    assert row.conditions == {"replicas": 2, "lr": TINY.lr}


def test_every_method_has_options_that_hold() -> None:
    for method in METHODS:
        parse_options(method.name, method.options)


def test_a_loss_that_is_not_finite_ends_the_comparison(subwords: tuple[Corpus, Weights]) -> None:
    """Logits of +-2.4e38 whatever is read: where a target's is the low one, the loss overflows."""
    corpus, weights = subwords[0], dict(subwords[1])
    weights["final_norm.weight"] = torch.zeros(TINY.width)
    weights["final_norm.bias"] = torch.ones(TINY.width)
    sign = 1.0 - 2.0 * (torch.arange(TINY.vocab) % 2).unsqueeze(1)
    weights["head.weight"] = (1.5e37 * sign).repeat(1, TINY.width)
    with pytest.raises(RuntimeError, match="all-reduce fp32: the loss is not finite"):
        train(corpus, METHODS[0], TINY, replicas=2, weights=weights, seed=0)


def test_the_large_model_is_as_large_as_it_says() -> None:
    per_layer = 12 * GPT2.width**2
    assert GPT2.layers * per_layer + 2 * GPT2.vocab * GPT2.width > 11e6
    assert shortened(GPT2, 0.25).sequences == GPT2.sequences // 4
