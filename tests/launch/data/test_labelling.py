"""What a label field may hold, by what the model is trained for; and how texts are cut."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.wordpieces import save_wordpieces
from thinpipe.launch.data.classification import Labelling
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.load import load
from thinpipe.launch.data.tokenizer import Bytes, load_tokenizer

SEVERAL = Labelling(3, "multi_label_classification")
NUMBER, NUMBERS = Labelling(1, "regression"), Labelling(2, "regression")


def targets(folder: Path, given: list[Any], labelling: Labelling, **more: Any) -> list[Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"t": "x", "l": label}) + "\n" for label in given))
    config = DataConfig(
        path=str(file),
        eval_path=str(file),
        text_field="t",
        label_field="l",
        sequence_length=4,
        train_sequences="all",
        eval_sequences="all",
        **more,
    )
    samples = load(config, labelling=labelling)[0]
    found: list[Any] = samples.batch(range(len(given))).targets.tolist()
    return found


def test_several_labels_are_lists_of_them_or_flags(tmp_path: Path) -> None:
    expected = [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert targets(tmp_path, [[0, 2], [], [1]], SEVERAL) == expected
    assert targets(tmp_path, [["c", "a"], [], ["b"]], SEVERAL, labels=("a", "b", "c")) == expected
    flags = [[True, False, True], [], [False, True, False]]
    assert targets(tmp_path, flags, SEVERAL) == expected
    assert targets(tmp_path, [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]], SEVERAL) == expected[:2]


def test_numbers_are_predicted_as_they_are(tmp_path: Path) -> None:
    assert targets(tmp_path, [1, 2.5, "-3.25"], NUMBER) == [[1], [2.5], [-3.25]]
    assert targets(tmp_path, [[1, 2], [0.5, -1]], NUMBERS) == [[1, 2], [0.5, -1]]


@pytest.mark.parametrize(
    ("label", "labelling", "message"),
    [
        (2, SEVERAL, r"field 'l' is not a list of labels, such as .*rows.jsonl:1 has 2"),
        ("0 2", SEVERAL, r"not a list of labels.*:1 has '0 2'"),
        ([0, 3], SEVERAL, r"labels 0 to 2, which model.classes = 3 allows .*:1 has \[0, 3\]"),
        ([1, 1], SEVERAL, r"has a label twice; list each once, or write flags"),
        ([1.0, 0.5, 0.0], SEVERAL, r"not 3 flags of 0 and 1"),
        ([True, False], SEVERAL, r"not 3 flags of 0 and 1"),
        ([["a"]], SEVERAL, r"list, not a label"),
        ("good", NUMBER, r"is not a number, which regression needs .*:1 has 'good'"),
        (True, NUMBER, r"is not a number.* has True"),
        ("nan", NUMBER, r"is not a number.* has 'nan'"),
        (-100, NUMBER, r"is -100, which stands for a target that is not counted"),
        ([1, 2], NUMBER, r"2 numbers where model.classes = 1"),
        (1, NUMBERS, r"1 numbers where model.classes = 2"),
        ([1], Labelling(), r"is list, not a label of text or a whole number"),
    ],
)
def test_labels_that_do_not_fit_are_named(
    label: Any, labelling: Labelling, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        targets(tmp_path, [label], labelling)


@pytest.mark.parametrize(
    ("first", "second", "length", "kept"),
    [
        (9, 2, 8, (5, 2)),
        (2, 9, 8, (2, 5)),
        (9, 9, 8, (3, 4)),
        (9, 9, 9, (4, 4)),
        (3, 3, 7, (3, 3)),
        (9, None, 4, (4, 0)),
    ],
)
def test_bytes_of_the_longer_text_go_first(
    first: int, second: int | None, length: int, kept: tuple[int, int]
) -> None:
    text, other = "a" * first, None if second is None else "b" * second
    fitted = Bytes().fitted(text, other, length)
    assert (fitted.ids.count(ord("a")), fitted.ids.count(ord("b"))) == kept
    assert fitted.ids.count(0) == (other is not None)
    assert fitted.truncated == (len(fitted.ids) < first + (0 if second is None else second + 1))


def test_every_length_is_cut_as_transformers_does(tmp_path: Path) -> None:
    whole = save_wordpieces(tmp_path, list("abcdefgh"))
    ours = load_tokenizer(str(tmp_path))
    for text, other in (("a b c d e f g", "h a"), ("a", "b c d e f g"), ("a b c d", "e f g h")):
        for length in range(4, 14):
            theirs = whole(text, other, truncation="longest_first", max_length=length,
                           return_token_type_ids=True)  # fmt: skip
            fitted = ours.fitted(text, other, length)
            assert fitted.ids == theirs["input_ids"]
            assert fitted.types == theirs["token_type_ids"]
    assert ours.fitted("a b c d", None, 9).truncated is False
    with pytest.raises(ValueError, match=r"sequence_length = 3: no room for text with 3 special"):
        ours.fitted("a b c", "d", 3)
    with pytest.raises(ValueError, match=r"no room for text with 2 special tokens; use at least"):
        ours.fitted("a b c", None, 2)
