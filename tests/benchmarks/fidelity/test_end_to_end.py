"""What the benchmark reads from runs, its table and picture, and one pair of tiny runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fidelity.end_to_end import (
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
    first, last = found.epochs
    assert last.loss < first.loss
    assert last.cut_values == TINY.sequences * TINY.tokens * 32 * 2  # width, both ways
    assert last.cut_nbytes < 2 * last.cut_values
    assert last.sync_nbytes > 0
    (tmp_path / "rest.txt").unlink()
    assert fine_tune(texts, TINY, model, method="AQ-SGD + CocktailSGD", seed=0) == found
    longer = replace(TINY, epochs=3)
    with pytest.raises(ValueError, match=r"aq-sgd-cocktailsgd-0: was run with the settings of"):
        fine_tune(texts, longer, model, method="AQ-SGD + CocktailSGD", seed=0)


def test_the_table_compares_with_the_same_seed(tmp_path: Path) -> None:
    def outcome(method: str, seed: int, loss: float, nbytes: int) -> Outcome:
        epoch = Epoch(loss, loss, loss, nbytes, 1000, 10 * nbytes)
        return Outcome(method, seed, (epoch, epoch))

    other = list(METHODS)[-1]
    outcomes = [outcome(BASELINE, seed, 4.0 + seed, 4000) for seed in (0, 1)]
    sizes = (30, 50)  # coded messages differ; the median is shown
    outcomes += [outcome(other, seed, 4.25 + seed, sizes[seed]) for seed in (0, 1)]
    cells = [cell.strip() for cell in table(outcomes).splitlines()[-1].split("|")[1:-1]]
    assert cells[:3] == [other, "4.7500", "+0.2500, +0.2500"]
    assert cells[6] == cells[8] == cells[9] == "100.0x"
    draw(outcomes, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
