"""The parity benchmark on a model of toy size: what it compares, its table and picture."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.finetuning import Corpus, Scale, pretrain
from benchmarks.harness import Records
from benchmarks.replicas.parity import (
    BASELINE,
    METHOD_LABELS,
    METHODS,
    chosen_methods,
    compare,
    draw,
    read_texts,
    table,
)
from benchmarks.replicas.training import Epoch, Method, Outcome, train

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


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    words = ["thin ", "pipe ", "sends ", "few ", "bytes ", "over ", "slow ", "links\n"]
    for name, seed in (("train", 1), ("tune", 2)):
        text = "".join(random.Random(seed).choices(words, k=1500))
        (tmp_path / name).write_text(text)
    return read_texts(tmp_path / "train", tmp_path / "tune", TINY)


def test_exact_averages_of_parameters_and_of_gradients_both_learn(
    corpus: Corpus, tmp_path: Path
) -> None:
    exact = {"subset": 1.0, "topk": 1.0, "bits": 32, "delayed": False}
    methods = [METHODS[0], Method("cocktail exact", "cocktail", exact)]
    path = tmp_path / "out.jsonl"
    plain, cocktail = compare(corpus, TINY, methods, replicas=2, seeds=[0], records=Records(path))
    for outcome in (plain, cocktail):
        assert outcome.epochs[-1].tuned < outcome.epochs[0].local
    assert plain.ratio == pytest.approx(1.0, abs=0.1)  # headers alone
    assert 0.9 < cocktail.ratio < 3  # characters that do not occur do not move: zstd finds that
    assert cocktail.epochs[-1].tuned == pytest.approx(plain.epochs[-1].tuned, abs=0.05)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["result"]["method"] for line in lines] == [BASELINE, "cocktail exact"]
    assert lines[1]["config"]["method"]["options"]["bits"] == 32


def test_methods_are_compared_with_exact_averages_whatever_was_asked_for() -> None:
    labels = [method.label for method in chosen_methods(["quantize 1 bit"])]
    assert labels == [BASELINE, "quantize 1 bit"]
    assert [method.label for method in chosen_methods(None)] == list(METHOD_LABELS)


def test_a_loss_that_is_not_finite_ends_the_comparison(corpus: Corpus) -> None:
    """Logits of +-2.4e38 whatever is read: where a target's is the low one, the loss overflows."""
    weights = dict(pretrain(corpus, replace(TINY, pretrain_steps=1), seed=0))
    weights["final_norm.weight"] = torch.zeros(TINY.width)
    weights["final_norm.bias"] = torch.ones(TINY.width)
    sign = 1.0 - 2.0 * (torch.arange(TINY.vocab) % 2).unsqueeze(1)
    weights["head.weight"] = (1.5e37 * sign).repeat(1, TINY.width)
    with pytest.raises(RuntimeError, match="all-reduce fp32, epoch 1: the loss is not finite"):
        train(corpus, METHODS[0], TINY, replicas=2, weights=weights, seed=0)


def outcome(method: str, seed: int, loss: float) -> Outcome:
    return Outcome(method, seed, (Epoch(3.0, 3.0, 3.0), Epoch(loss, loss, loss)), 10.0, 1000.0, 1.0)


def test_the_table_compares_with_the_same_seed(tmp_path: Path) -> None:
    outcomes = [outcome(m, s, 1.0 + s + d) for s in (0, 1) for m, d in ((BASELINE, 0), ("x", 0.25))]
    cells = [cell.strip() for cell in table(outcomes).splitlines()[-1].split("|")[1:-1]]
    assert cells[:4] == ["x", "100.0x", "50.0x", "0.320"]
    assert cells[5] == cells[7] == "+0.2500 (+0.2500 to +0.2500)"
    draw(outcomes, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
