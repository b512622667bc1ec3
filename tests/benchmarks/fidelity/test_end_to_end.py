"""What the benchmark reads from runs, its table and picture, and one pair of tiny runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fidelity.end_to_end import (
    BASELINE,
    METHODS,
    Scale,
    Texts,
    beside,
    draw,
    fine_tune,
    make_row,
    prepare,
    table,
)
from benchmarks.fidelity.report import LOSSES
from benchmarks.harness import Row
from tests.huggingface import LAYERS, saved_model

TINY = Scale(layers=LAYERS, tokens=16, sequences=16, epochs=2, batch=8, held_out=4)
WORDS = ("thin ", "pipe ", "sends ", "few ", "bytes\n")


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_of_the_real_launcher_is_read_and_not_repeated(tmp_path: Path) -> None:
    model = tmp_path / "model"
    saved_model("gpt2", model)
    letters = sorted(set("".join(WORDS).replace(" ", "Ġ").replace("\n", "Ċ")))
    (model / "vocab.json").write_text(json.dumps({c: n for n, c in enumerate(letters)}))
    (model / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "rest.txt").write_text("".join(WORDS) * 50)
    texts = Texts(model, tmp_path / "rest.txt", model, tmp_path)
    assert prepare(texts, TINY) == model  # made before
    found = fine_tune(texts, TINY, model, method="AQ-SGD + CocktailSGD", seed=0)
    first, last = found.detail["epochs"]
    assert last["loss"] < first["loss"]
    assert last["cut values"] == TINY.sequences * TINY.tokens * 32 * 2  # width, both ways
    assert last["cut bytes"] < 2 * last["cut values"]
    assert last["sync bytes"] > 0
    (tmp_path / "rest.txt").unlink()
    assert fine_tune(texts, TINY, model, method="AQ-SGD + CocktailSGD", seed=0) == found
    longer = replace(TINY, epochs=3)
    with pytest.raises(ValueError, match=r"aq-sgd-cocktailsgd-0: was run with the settings of"):
        fine_tune(texts, longer, model, method="AQ-SGD + CocktailSGD", seed=0)


def test_the_table_compares_with_the_same_seed(tmp_path: Path) -> None:
    def row(method: str, seed: int, loss: float, nbytes: int) -> Row:
        sent = {"cut bytes": nbytes, "cut values": 1000, "sync bytes": 10 * nbytes}
        return make_row(method, seed, [dict.fromkeys(LOSSES, loss) | sent] * 2)

    other, rows = list(METHODS)[-1], list[Row]()
    for seed in (0, 1):
        rows.append(beside(row(BASELINE, seed, 4.0 + seed, 4000), rows))
    for seed, size in enumerate((30, 50)):  # coded messages differ; the median is shown
        rows.append(beside(row(other, seed, 4.25 + seed, size), rows))
    cells = [cell.strip() for cell in table(rows).splitlines()[-1].split("|")[1:-1]]
    assert cells[:4] == [other, "2", "4.7500", "+0.2500"]
    assert cells[7] == cells[9] == cells[10] == "106.7"  # of 133 and 80
    draw(rows, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
