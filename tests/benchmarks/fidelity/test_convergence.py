"""The convergence benchmark on a model of toy size: its experiment, tables and picture."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.convergence import METHODS, compare, main
from benchmarks.fidelity.finetuning import (
    Corpus,
    Epoch,
    Scale,
    fine_tune,
    pretrain,
    read_corpus,
    sizes,
)
from benchmarks.fidelity.report import BASELINE, LOSSES, draw, read_rows, table
from benchmarks.fidelity.sentences import write_text
from benchmarks.fidelity.tah_quant import TahQuant
from benchmarks.harness import Records, Row, with_gaps
from thinpipe.pipeline.wire.header import HEADER_NBYTES

TINY = Scale(
    layers=3,
    width=16,
    heads=2,
    tokens=16,
    pretrain_steps=60,
    pretrain_batch=8,
    sequences=12,
    epochs=3,
    batch=4,
    held_out=8,
)
CUTS, MESSAGES, VALUES = 2, 2 * 3, 12 * 16 * 16  # messages and values of a direction, per epoch


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    words = ["thin ", "pipe ", "sends ", "few ", "bytes ", "over ", "slow ", "links\n"]
    for name, seed in (("train", 1), ("eval", 2)):
        text = "".join(random.Random(seed).choices(words, k=1000))
        (tmp_path / name).write_text(text)
    return read_corpus(tmp_path / "train", tmp_path / "eval", TINY)


def test_pretraining_learns_and_depends_on_the_seed_alone(corpus: Corpus) -> None:
    first, second = (pretrain(corpus, TINY, seed=0) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    row = fine_tune(corpus, TINY.run(METHODS["fp32"], 0), first, method="fp32")
    assert row.numbers["before"] < 4.0  # untrained: ln 256 = 5.5
    assert row.detail["epochs"][-1]["loss"] < row.detail["epochs"][0]["loss"]


def epochs(row: Row) -> list[Epoch]:
    return [Epoch(**epoch) for epoch in row.detail["epochs"]]


def test_bytes_are_those_of_the_codecs(corpus: Corpus, tmp_path: Path) -> None:
    methods = ["fp32", "aq fw3/bw6", "direct fw2/bw4", "tah-quant fw4/bw6"]
    path = tmp_path / "out.jsonl"
    rows = compare(corpus, TINY, methods=methods, seeds=[0], records=Records(path))
    plain, delta, direct, tiles = map(epochs, rows)
    scales = VALUES // TINY.width * 2
    fixed = MESSAGES * HEADER_NBYTES
    assert plain[0].nbytes == 2 * CUTS * (4 * VALUES + fixed)
    assert direct[0].forward_bytes == CUTS * (VALUES // 4 + scales + fixed)
    assert [epoch.forward_bytes for epoch in delta] == [
        CUTS * (VALUES * bits // 8 + scales + fixed) for bits in (8, 3, 3)
    ]
    coded = TahQuant(TINY.width).capacity(VALUES // TINY.sequences) * TINY.sequences
    assert tiles[0].forward_bytes == CUTS * (coded + fixed)
    assert tiles[0].backward_bytes == CUTS * (VALUES * 6 // 8 + scales + fixed)
    assert delta[1].values == 2 * CUTS * VALUES
    assert [row.method for row in rows] == methods
    assert rows[0].numbers["loss gap"] == rows[0].numbers["held out gap"] == 0.0
    numbers = rows[2].numbers
    assert numbers["bits forward"] == 8 * direct[1].forward_bytes / (CUTS * VALUES)
    assert numbers["loss gap"] == direct[-1].loss - plain[-1].loss
    later = sum(epoch.nbytes for epoch in delta[1:])
    assert rows[1].numbers["x fp32"] == pytest.approx(8 * CUTS * VALUES * 2 / later)
    assert rows[1].numbers["x fp32, whole run"] < rows[1].numbers["x fp32"]
    assert read_rows(path) == rows
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[1]["config"]["run"]["boundary"][0]["forward"]["bits"] == 3


def test_methods_start_from_the_same_weights_and_differ_in_training(corpus: Corpus) -> None:
    methods = ["fp32", "direct fw2/bw4", "aq fw2/bw4"]
    rows = compare(corpus, TINY, methods=methods, seeds=range(2), records=Records(None))
    assert [row.seed for row in rows] == [0, 0, 0, 1, 1, 1]
    assert len({(row.seed, row.numbers["before"]) for row in rows}) == 2
    assert len({row.numbers["loss"] for row in rows}) == 6
    changes = [[epoch.change for epoch in epochs(row)] for row in rows[:3]]
    assert changes[:2] == [[None] * 3] * 2
    assert changes[2][0] is None
    assert all(ratio is not None and 0 < ratio < 1 for ratio in changes[2][1:])


@pytest.mark.parametrize("switch", [[], ["--quick"]])
def test_the_methods_that_are_named_are_run_and_no_others(
    corpus: Corpus, tmp_path: Path, switch: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval").write_text("thin pipe sends few bytes\n" * 500)
    sizes = {"layers": 2, "width": 16, "tokens": 16, "sequences": 8, "epochs": 1, "batch": 4}
    words = [str(word) for name, size in sizes.items() for word in (f"--{name}", size)]
    texts = ["--train", str(tmp_path / "train"), "--eval", str(tmp_path / "eval")]
    named = ["--methods", "direct fw2/bw4", "--seeds", "1", "--pretrain-steps", "2"]
    main([*switch, *texts, *words, *named, "--json", str(tmp_path / "out.jsonl")])
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row.method for row in rows] == [BASELINE, "direct fw2/bw4"]
    said = capsys.readouterr().out
    assert f"{BASELINE} is measured too: the others are compared with it" in said
    assert ("--quick: share = 0.5 instead of 1.0" in said) == bool(switch)


@pytest.mark.parametrize("stages", [3, 1])
def test_stages_share_the_layers(stages: int) -> None:
    cuts = replace(TINY, layers=6, stages=stages).run(METHODS["fp32"], 0).pipeline.cuts
    assert cuts == tuple(range(6 // stages, 6, 6 // stages))


def test_memories_in_both_directions_and_a_transform_are_compared(corpus: Corpus) -> None:
    methods = ["fp32", "both rate 0.6/0.5", "transform .6/.6"]
    scale = replace(TINY, vocab=256, epochs=2)
    rows = compare(
        corpus, scale, methods=methods, seeds=[0], records=Records(None), rates=[1e-3, 1e-4]
    )
    assert [row.conditions["lr"] for row in rows] == [1e-3] * 3 + [1e-4] * 3
    for row in rows[1:3]:
        first, second = epochs(row)
        assert first.nbytes > second.nbytes


def test_classifiers_start_from_the_language_model(corpus: Corpus, tmp_path: Path) -> None:
    rows = [f"x\t{i % 2}\t\t{('thin', 'slow')[i % 2]} pipe {i}" for i in range(12)]
    path = tmp_path / "labelled.tsv"
    path.write_text("\n".join(rows))
    scale = replace(TINY, task="classification", dropout=0.1, epochs=12, lr=5e-3)
    labelled = read_corpus(tmp_path / "train", tmp_path / "eval", scale, labelled=(path, path))
    weights = pretrain(corpus, TINY, seed=0)
    changes = {}
    for masks in ("random", "repeated"):
        config = replace(scale, dropout_masks=masks).run(METHODS["aq fw4/bw8"], 0)
        found = fine_tune(labelled, config, weights, method="aq fw4/bw8")
        changes[masks] = epochs(found)[-1].change  # where the rate has decayed
    assert found.numbers["accuracy"] > 0.9
    assert found.numbers["matthews"] > 0.8
    assert changes["repeated"] is not None
    assert changes["random"] is not None
    assert changes["repeated"] < 0.6 * changes["random"]


def test_sentences_are_classified_in_subwords(tmp_path: Path) -> None:
    rows = [
        f"x\t{i % 2}\t*\tthe {('pipe', 'slow')[i % 2]} link number {i} is thin." for i in range(40)
    ]
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("\n".join(rows))
    for name in ("train", "eval"):
        (tmp_path / name).write_text("a well @-@ known text , which is thin . \n" * 200)
    scale = replace(TINY, task="classification", vocab=270, sequences=40, batch=8)
    labelled = (tmp_path / "train.tsv", tmp_path / "dev.tsv")
    corpus = read_corpus(tmp_path / "train", tmp_path / "eval", scale, labelled=labelled)
    assert (len(corpus.tune), len(corpus.held_out)) == (40, 40)
    assert int(corpus.pretrain.batch([0]).inputs_BT.max()) >= 256  # learned tokens occur
    found = fine_tune(
        corpus,
        replace(scale, epochs=12, lr=5e-3).run(METHODS["aq fw4/bw8"], 0),
        pretrain(corpus, scale, seed=0),
        method="aq fw4/bw8",
    )
    assert found.numbers["matthews"] > 0.8
    assert found.numbers["matthews, compressed"] > 0.8


def test_pretraining_text_has_acceptable_sentences_and_ordinary_spelling(tmp_path: Path) -> None:
    (tmp_path / "cola.tsv").write_text("a\t1\t\tIt rains.\nb\t0\t*\tRains it the.\n")
    (tmp_path / "wiki").write_text("A well @-@ known 1 @,@ 000 , he 's here .")
    write_text(tmp_path / "out", texts=[tmp_path / "wiki"], labelled=tmp_path / "cola.tsv")
    assert (tmp_path / "out").read_text(
        encoding="utf-8"
    ) == "It rains.\nA well-known 1,000, he's here."


def row(method: str, seed: int, losses: Sequence[float], nbytes: int = 100) -> Row:
    found = [Epoch(loss, nbytes, 300, 800, None) for loss in losses]
    numbers = {"loss": losses[-1], "held out": 2.0, "held out, compressed": 2.5, **sizes(found)}
    return Row(method, numbers, {"lr": 1e-3}, seed, {"epochs": [asdict(epoch) for epoch in found]})


def cells(rows: Sequence[Row]) -> dict[str, str]:
    """Of the last line, by head."""
    compared = list[Row]()
    for each in rows:
        compared.append(with_gaps(each, compared, BASELINE, LOSSES))
    heads, _, *_, last = table(compared).splitlines()
    names, found = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (heads, last))
    return dict(zip(names, found, strict=True))


def test_the_table_compares_with_the_baseline_of_the_same_seed() -> None:
    rows = [
        row("fp32", 0, [3.0, 1.0]),
        row("aq fw3/bw6", 0, [3.0, 1.25]),
        row("fp32", 1, [3.0, 2.0]),
        row("aq fw3/bw6", 1, [3.0, 2.0]),
    ]
    found = cells(rows)
    assert found["method"] == "aq fw3/bw6"
    assert (found["lr"], found["seeds"], found["loss"]) == ("0.001", "2", "1.6250")
    assert found["loss gap"] == "+0.1250 (+0.0000 to +0.2500)"
    assert found["held out gap"] == "+0.0000"
    assert found["x fp32"] == "8.0"
    assert "change, epoch 2" not in found


def test_bytes_of_coded_messages_are_medians_over_seeds() -> None:
    sizes = enumerate((9_000_000, 2_000_000, 4_000_000))
    found = cells([row("fp32", seed, [3.0, 2.0], size) for seed, size in sizes])
    assert found["MB of epoch 1"] == found["MB of the last"] == "4.0"


def test_scores_are_tabled_with_and_without_compression() -> None:
    scored = [
        replace(each, numbers={**each.numbers, "matthews": 0.2 * each.seed, "x, compressed": 0.5})
        for each in (row("fp32", seed, [1.0]) for seed in range(3))
    ]
    found = cells(scored)
    assert (found["matthews"], found["x, compressed"]) == ("0.200", "0.500")


def test_the_picture_is_a_small_png(tmp_path: Path) -> None:
    rows = [
        row(method, seed, [3.0, 2.0, 1.0 + index / 9])
        for seed in range(2)
        for index, method in enumerate(METHODS)
    ]
    draw(rows, tmp_path / "loss.png")
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000
