"""The convergence benchmark on a model of toy size: its experiment, tables and picture."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.convergence import BASELINE, LOSSES, METHODS, compare, main, table
from benchmarks.fidelity.finetuning import (
    Corpus,
    Epoch,
    Scale,
    fine_tune,
    pretrain,
    read_corpus,
    sizes,
)
from benchmarks.harness import Records, Row, read_results, with_gaps
from tests.texts import write_words
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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_words(tmp_path_factory.mktemp("texts"), 1000)


@pytest.fixture(scope="module")
def corpus(texts: tuple[Path, Path]) -> Corpus:
    return read_corpus(*texts, TINY)


def test_pretraining_learns_and_depends_on_the_seed_alone(corpus: Corpus) -> None:
    first, second = (pretrain(corpus, TINY, seed=0) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    row = fine_tune(corpus, TINY.run(METHODS["fp32"], 0), first, method="fp32")
    assert row.numbers["before"] < 4.0  # untrained: ln 256 = 5.5
    assert row.detail["epochs"][-1]["loss"] < row.detail["epochs"][0]["loss"]


def epochs(row: Row) -> list[Epoch]:
    return [Epoch(**epoch) for epoch in row.detail["epochs"]]


def test_methods_start_from_the_same_weights_and_send_what_their_codecs_say(
    corpus: Corpus, tmp_path: Path
) -> None:
    methods = ["fp32", "aq fw3/bw6", "direct fw2/bw4"]
    path = tmp_path / "out.jsonl"
    rows = compare(corpus, TINY, methods=methods, seeds=[0], records=Records(path))
    plain, delta, direct = map(epochs, rows)
    scales = VALUES // TINY.width * 2
    fixed = MESSAGES * HEADER_NBYTES
    assert plain[0].nbytes == 2 * CUTS * (4 * VALUES + fixed)
    assert direct[0].forward_bytes == CUTS * (VALUES // 4 + scales + fixed)
    assert [epoch.forward_bytes for epoch in delta] == [
        CUTS * (VALUES * bits // 8 + scales + fixed) for bits in (8, 3, 3)
    ]
    assert delta[1].values == 2 * CUTS * VALUES
    assert [row.method for row in rows] == methods
    assert rows[0].numbers["loss gap"] == rows[0].numbers["held out gap"] == 0.0
    numbers = rows[2].numbers
    assert numbers["bits forward"] == 8 * direct[1].forward_bytes / (CUTS * VALUES)
    assert numbers["loss gap"] == direct[-1].loss - plain[-1].loss
    later = sum(epoch.nbytes for epoch in delta[1:])
    assert rows[1].numbers["x fp32"] == pytest.approx(8 * CUTS * VALUES * 2 / later)
    assert rows[1].numbers["x fp32, whole run"] < rows[1].numbers["x fp32"]
    assert [Row(**row) for row in read_results(path)] == rows
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[1]["config"]["run"]["boundary"][0]["forward"]["bits"] == 3
    assert len({row.numbers["before"] for row in rows}) == 1
    assert len({row.numbers["loss"] for row in rows}) == len(methods)
    assert [epoch.change for epoch in plain + direct] == [None] * 6
    assert delta[0].change is None
    assert all(epoch.change is not None and 0 < epoch.change < 1 for epoch in delta[1:])


def test_the_methods_that_are_named_are_run_and_no_others(
    texts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval").write_text("thin pipe sends few bytes\n" * 500)
    sizes = {"layers": 2, "width": 16, "tokens": 16, "sequences": 8, "epochs": 1, "batch": 4}
    words = [str(word) for name, size in sizes.items() for word in (f"--{name}", size)]
    files = ["--train", str(texts[0]), "--eval", str(tmp_path / "eval")]
    named = ["--methods", "direct fw2/bw4", "--seeds", "1", "--pretrain-steps", "2"]
    main(["--quick", *files, *words, *named, "--json", str(tmp_path / "out.jsonl")])
    rows = [Row(**row) for row in read_results(tmp_path / "out.jsonl")]
    assert [row.method for row in rows] == [BASELINE, "direct fw2/bw4"]
    said = capsys.readouterr().out
    assert f"{BASELINE} is measured too: the others are compared with it" in said
    assert "--quick: share = 0.5 instead of 1.0" in said


@pytest.mark.parametrize("stages", [3, 1])
def test_stages_share_the_layers(stages: int) -> None:
    cuts = replace(TINY, layers=6, stages=stages).run(METHODS["fp32"], 0).pipeline.cuts
    assert cuts == tuple(range(6 // stages, 6, 6 // stages))


def test_a_transform_sends_fewer_bytes_in_later_epochs(corpus: Corpus) -> None:
    methods = ["fp32", "transform .6/.6"]
    scale = replace(TINY, vocab=256, epochs=2)
    rows = compare(corpus, scale, methods=methods, seeds=[0], records=Records(None), rates=[1e-3])
    assert [row.conditions["lr"] for row in rows] == [1e-3] * 2
    first, second = epochs(rows[1])
    assert first.nbytes > second.nbytes


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
