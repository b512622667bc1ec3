"""The convergence benchmark on a model of toy size: its experiment, tables and picture."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.convergence import METHODS, compare
from benchmarks.fidelity.finetuning import Corpus, Scale, fine_tune, pretrain, read_corpus
from benchmarks.fidelity.report import (
    Epoch,
    Outcome,
    draw,
    per_seed_table,
    read_outcomes,
    relative_table,
    score_table,
    summary_table,
)
from benchmarks.fidelity.sentences import write_text
from benchmarks.harness import Records
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
    outcome = fine_tune(corpus, TINY.run(METHODS["fp32"], 0), first, method="fp32")
    assert outcome.held_out_before < 4.0  # untrained: ln 256 = 5.5
    assert outcome.epochs[-1].loss < outcome.epochs[0].loss


def test_bytes_are_those_of_the_codecs(corpus: Corpus, tmp_path: Path) -> None:
    methods = ["aq fw3/bw6", "direct fw2/bw4"]
    path = tmp_path / "out.jsonl"
    plain, delta, direct = compare(corpus, TINY, methods=methods, seeds=[0], records=Records(path))
    scales = VALUES // TINY.width * 2
    fixed = MESSAGES * HEADER_NBYTES
    assert plain.epochs[0].nbytes == 2 * CUTS * (4 * VALUES + fixed)
    assert direct.epochs[0].forward_bytes == CUTS * (VALUES // 4 + scales + fixed)
    assert [epoch.forward_bytes for epoch in delta.epochs] == [
        CUTS * (VALUES * bits // 8 + scales + fixed) for bits in (8, 3, 3)
    ]
    assert delta.epochs[1].values == 2 * CUTS * VALUES
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [line["result"] for line in lines]
    assert [row["method"] for row in rows] == ["fp32", *methods]
    assert rows[0]["train_gap"] == rows[0]["held_out_gap"] == 0.0
    assert rows[2]["bits_forward"] == 8 * direct.epochs[1].forward_bytes / (CUTS * VALUES)
    assert rows[2]["train_gap"] == direct.final_loss - plain.final_loss
    both = [sum(epoch.nbytes for epoch in run.epochs[1:]) for run in (plain, delta)]
    assert rows[1]["ratio_fp32"] == pytest.approx(8 * CUTS * VALUES * 2 / both[1])
    assert rows[1]["ratio_fp32_run"] < rows[1]["ratio_fp32"]
    assert read_outcomes(path) == [plain, delta, direct]
    assert lines[1]["config"]["run"]["boundary"][0]["forward"]["bits"] == 3


def test_methods_start_from_the_same_weights_and_differ_in_training(corpus: Corpus) -> None:
    outcomes = compare(
        corpus,
        TINY,
        methods=["direct fw2/bw4", "aq fw2/bw4"],
        seeds=range(2),
        records=Records(None),
    )
    assert [outcome.seed for outcome in outcomes] == [0, 0, 0, 1, 1, 1]
    before = {(outcome.seed, outcome.held_out_before) for outcome in outcomes}
    assert len(before) == 2
    assert len({outcome.final_loss for outcome in outcomes}) == 6
    changes = [[epoch.change for epoch in outcome.epochs] for outcome in outcomes[:3]]
    assert changes[:2] == [[None] * 3] * 2
    assert changes[2][0] is None
    assert all(ratio is not None and 0 < ratio < 1 for ratio in changes[2][1:])


@pytest.mark.parametrize("stages", [3, 1])
def test_stages_share_the_layers(stages: int) -> None:
    cuts = replace(TINY, layers=6, stages=stages).run(METHODS["fp32"], 0).pipeline.cuts
    assert cuts == tuple(range(6 // stages, 6, 6 // stages))


def test_memories_in_both_directions_and_a_transform_are_compared(corpus: Corpus) -> None:
    methods = ["both rate 0.6/0.5", "transform .6/.6"]
    scale = replace(TINY, vocab=256, epochs=2)
    outcomes = compare(
        corpus, scale, methods=methods, seeds=[0], records=Records(None), rates=[1e-3, 1e-4]
    )
    assert [outcome.lr for outcome in outcomes] == [1e-3] * 3 + [1e-4] * 3
    assert all(outcome.epochs[0].nbytes > outcome.epochs[1].nbytes for outcome in outcomes[1:3])


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
        changes[masks] = found.epochs[-1].change  # where the rate has decayed
    assert found.scores["accuracy"] > 0.9
    assert found.scores["matthews"] > 0.8
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
    assert found.scores["matthews"] > 0.8
    assert found.scores_compressed["matthews"] > 0.8


def test_pretraining_text_has_acceptable_sentences_and_ordinary_spelling(tmp_path: Path) -> None:
    (tmp_path / "cola.tsv").write_text("a\t1\t\tIt rains.\nb\t0\t*\tRains it the.\n")
    (tmp_path / "wiki").write_text("A well @-@ known 1 @,@ 000 , he 's here .")
    write_text(tmp_path / "out", texts=[tmp_path / "wiki"], labelled=tmp_path / "cola.tsv")
    assert (tmp_path / "out").read_text(
        encoding="utf-8"
    ) == "It rains.\nA well-known 1,000, he's here."


def outcome(method: str, seed: int, losses: Sequence[float]) -> Outcome:
    epochs = tuple(Epoch(loss, 100, 300, 800, None) for loss in losses)
    return Outcome(method, seed, epochs, 3.0, 2.0, 2.5, 1.0)


def test_tables_compare_with_the_baseline_of_the_same_seed() -> None:
    outcomes = [
        outcome("fp32", 0, [3.0, 1.0]),
        outcome("aq fw3/bw6", 0, [3.0, 1.25]),
        outcome("fp32", 1, [3.0, 2.0]),
        outcome("aq fw3/bw6", 1, [3.0, 2.0]),
    ]
    row = per_seed_table(outcomes).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "aq fw3/bw6",
        "1.2500",
        "2.0000",
        "+0.2500",
        "+0.0000",
    ]
    summary = summary_table(outcomes).splitlines()[-1]
    cells = [cell.strip() for cell in summary.split("|")[1:-1]]
    assert cells[1:5] == ["1.6250", "+0.1250", "2.0000", "2.5000"]
    assert cells[7:] == ["8.00x", "4.00x", "-"]
    relative = relative_table(outcomes).splitlines()[-1]
    assert [cell.strip() for cell in relative.split("|")[2:5]] == [
        "2",
        "+0.1250",
        "+0.0000 to +0.2500",
    ]


def test_bytes_of_coded_messages_are_medians_over_seeds() -> None:
    runs = [outcome("fp32", seed, [3.0, 2.0]) for seed in range(3)]
    sizes = zip(runs, (9_000_000, 2_000_000, 4_000_000), strict=True)
    coded = [
        replace(run, epochs=tuple(replace(e, forward_bytes=size) for e in run.epochs))
        for run, size in sizes
    ]
    for table, place in ((summary_table, 6), (relative_table, 7)):
        cells = [cell.strip() for cell in table(coded).splitlines()[-1].split("|")]
        assert cells[place : place + 2] == ["4.0", "4.0"]


def test_tables_of_a_single_epoch_show_no_change() -> None:
    row = summary_table([outcome("fp32", 0, [3.0])]).splitlines()[-1]
    assert row.split("|")[-2].strip() == "-"


def test_scores_are_tabled_with_and_without_compression() -> None:
    runs = [outcome("fp32", seed, [1.0]) for seed in range(2)]
    scored = [
        replace(run, scores={"matthews": 0.2 * run.seed}, scores_compressed={"matthews": 0.5})
        for run in runs
    ]
    row = score_table(scored).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["fp32", "0.000, 0.200", "0.500"]


def test_the_picture_is_a_small_png(tmp_path: Path) -> None:
    outcomes = [
        outcome(method, seed, [3.0, 2.0, 1.0 + index / 9])
        for seed in range(2)
        for index, method in enumerate(METHODS)
    ]
    draw(outcomes, tmp_path / "loss.png")
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000
