"""What the benchmark reads from runs, its table and picture, and one pair of tiny runs."""

import json
from pathlib import Path

import pytest

from benchmarks.end_to_end import (
    BASELINE,
    METHODS,
    Epoch,
    Outcome,
    Scale,
    Texts,
    draw,
    fine_tune,
    prepare,
    table,
)

TINY = Scale(
    layers=2, width=16, tokens=16, pretrain_epochs=1, sequences=16, epochs=2, batch=8, held_out=4
)


@pytest.mark.dist
def test_runs_of_the_real_launcher_are_read(tmp_path: Path) -> None:
    words = ["thin ", "pipe ", "sends ", "few ", "bytes\n"]
    (tmp_path / "text").write_text("".join(words) * 200)
    letters = sorted(set("".join(words).replace(" ", "Ġ").replace("\n", "Ċ")))
    tokens = {token: number for number, token in enumerate([*letters, "<|endoftext|>"])}
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").write_text(json.dumps(tokens))
    (tmp_path / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    text = tmp_path / "text"
    texts = Texts(text, text, tmp_path / "tokenizer", tmp_path / "out")
    model = prepare(texts, TINY)
    found = fine_tune(texts, TINY, model, method="AQ-SGD + CocktailSGD", seed=0)
    first, last = found.epochs
    assert last.loss < first.loss
    assert last.cut_values == 16 * 16 * 16 * 2
    assert last.cut_nbytes < 2 * last.cut_values
    assert last.sync_nbytes > 0
    before = (texts.out / "runs" / "aq-sgd-cocktailsgd-0" / "metrics.jsonl").stat()
    assert fine_tune(texts, TINY, model, method="AQ-SGD + CocktailSGD", seed=0) == found
    after = (texts.out / "runs" / "aq-sgd-cocktailsgd-0" / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_table_compares_with_the_same_seed(tmp_path: Path) -> None:
    def outcome(method: str, seed: int, loss: float, nbytes: int) -> Outcome:
        epoch = Epoch(loss, loss, loss, nbytes, 1000, 10 * nbytes)
        return Outcome(method, seed, (epoch, epoch))

    other = list(METHODS)[-1]
    outcomes = [outcome(BASELINE, seed, 4.0 + seed, 4000) for seed in (0, 1)]
    outcomes += [outcome(other, seed, 4.25 + seed, 40) for seed in (0, 1)]
    cells = [cell.strip() for cell in table(outcomes).splitlines()[-1].split("|")[1:-1]]
    assert cells[:3] == [other, "4.7500", "+0.2500, +0.2500"]
    assert cells[6] == cells[8] == cells[9] == "100.0x"
    draw(outcomes, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
