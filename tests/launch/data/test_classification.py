"""Labelled texts and rows of every source, through `load`."""

import json
from pathlib import Path
from typing import Any

import pytest

from thinpipe.launch.data.classification import Labelling
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.load import load
from thinpipe.launch.data.sample_set import SampleSet

COLA = "".join(f"gj{i:02d}\t{i % 2}\t\tSentence {i}.\n" for i in range(40))


def _write(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def _config(path: str | None, **changes: Any) -> DataConfig:
    choices: dict[str, Any] = {
        "path": path,
        "text_field": 3,
        "label_field": 1,
        "sequence_length": 16,
        "train_sequences": "all",
        "eval_sequences": "all",
    }
    return DataConfig(**(choices | changes))


def _texts(samples: SampleSet) -> list[tuple[str, int]]:
    batch = samples.batch(range(len(samples)))
    assert batch.mask_BT is not None
    return [
        (bytes(tokens[mask].tolist()).decode(), int(label))
        for tokens, mask, label in zip(batch.inputs_BT, batch.mask_BT, batch.targets, strict=True)
    ]


def test_cola_is_read_by_column_numbers(tmp_path: Path) -> None:
    training, held_out = load(_config(_write(tmp_path, "cola.tsv", COLA)))
    everything = [(f"Sentence {i}.", i % 2) for i in range(40)]
    assert _texts(held_out) == everything[9::10]
    assert _texts(training) == [row for row in everything if row not in everything[9::10]]


def test_eval_path_is_what_is_held_out(tmp_path: Path) -> None:
    path = _write(tmp_path, "train.tsv", COLA)
    other = _write(tmp_path, "dev.tsv", "x\t1\t\tOther.\n")
    training, held_out = load(_config(path, eval_path=other, train_sequences=4))
    assert len(training) == 4
    assert _texts(held_out) == [("Other.", 1)]


def test_pairs_and_label_names(tmp_path: Path) -> None:
    rows = [{"q": "A?", "s": "B.", "l": name} for name in ("yes", "no")]
    path = _write(tmp_path, "qnli.jsonl", "\n".join(map(json.dumps, rows)))
    names: dict[str, Any] = {"text_field": "q", "pair_field": "s", "label_field": "l"}
    config = _config(path, eval_path=path, labels=["no", "yes"], **names)
    assert _texts(load(config)[0]) == [("A?\0B.", 1), ("A?\0B.", 0)]


def test_long_texts_are_truncated_with_a_note(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.tsv", COLA)
    training, _ = load(_config(path, sequence_length=11))
    assert _texts(training)[0] == ("Sentence 0.", 0)
    assert _texts(training)[-1][0] == "Sentence 38"
    note = f"note: data.path = {path!r}: texts truncated to fit data.sequence_length: 30"
    assert training.notes == (note,)


def test_the_digest_covers_labels(tmp_path: Path) -> None:
    one = load(_config(_write(tmp_path, "a.tsv", COLA)))[0]
    other = load(_config(_write(tmp_path, "b.tsv", COLA.replace("gj02\t0", "gj02\t1"))))[0]
    assert one.digest != other.digest


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("a\t-1\t\tx\n", {}, r"field 1 is not one of labels 0 to 1, which .*, row 1 has '-1'"),
        ("a\t1\t\tx\n", {"labels": ("n", "y")}, r"is not one of data.labels = \['n', 'y'\]"),
        ("a\t1\t\t\n", {}, r"no row can be used: 1 row is left out: field 3 is blank .*, row 1"),
        ("", {}, r"data.path = '.*a.tsv': no rows; name a file"),
        ("a\t1\t\tx\n", {"eval_path": None}, r"fewer than 10 rows, .* set data.eval_path"),
        (COLA, {"eval_sequences": 41}, r"data.eval_sequences = 41: .* gives 40 .* at most 40"),
        (COLA, {"format": "text"}, r"text has no fields \[3, 1\]; remove them"),
        (COLA, {"format": "jsonl"}, r"fields \[3, 1\]: jsonl has names, not numbers"),
    ],
)
def test_rows_and_settings_that_do_not_fit_are_named(
    tmp_path: Path, content: str, changes: dict[str, Any], message: str
) -> None:
    path = _write(tmp_path, "a.tsv", content)
    with pytest.raises(ValueError, match=message):
        load(_config(path, **({"eval_path": path} | changes)))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"path": "a", "sources": [{"path": "b", "weight": 1}]},
            r"path = 'a', sources = .*: two sources of text; remove one",
        ),
        ({"prompt_field": "q"}, r"prompt_field = 'q', response_field = None: .* needs both"),
        ({"label_field": "l"}, r"label_field = 'l': labels belong to a text; set text_field"),
        ({"pair_field": "s"}, r"pair_field = 's': this belongs to classification; set text_field"),
        ({"labels": ("a", "b")}, r"labels = \('a', 'b'\): this belongs to classification"),
        (
            {"prompt_field": "q", "response_field": "a", "text_field": "t"},
            r"text_field = 't': only prompts and responses are read; remove it",
        ),
        ({"objective": "prefix"}, r"objective = 'prefix': this belongs to instruction data"),
        ({"loss_on": "last"}, r"loss_on = 'last': this belongs to instruction data; set"),
        (
            {"path": "a", "text_field": "t", "label_field": "l", "packing": True},
            r"packing = True: labelled texts stand alone; remove it",
        ),
        (
            {"messages_field": "m", "prompt_field": "q", "response_field": "a"},
            r"prompt_field = 'q': only conversations are read; remove it",
        ),
        ({"messages_field": "m", "document_marks": "end"}, r"document_marks = 'end': only conv"),
        (
            {"sources": [{"path": "a", "weight": 1}], "text_field": "t", "stream_block": 4},
            r"stream_block = 4: streams need rows of one source; remove sources",
        ),
        ({"eval_path": "a"}, r"eval_path = 'a': nothing to train on"),
        ({"path": "a", "text_field": "t", "label_field": 1}, r"\['t', 1\]: some are names and"),
        (
            {"path": "a", "text_field": "t", "label_field": "l", "max_bytes": 9},
            r"max_bytes = 9: it limits running text; use train_sequences",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_rejected(
    choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**choices)


NO_TEXT: list[Any] = [["a", "list"], 3, 1.5, True, {"a": "b"}]


@pytest.mark.parametrize("field", ["a", "b"])
@pytest.mark.parametrize(
    "settings",
    [
        {"text_field": "a", "pair_field": "b", "label_field": "label"},
        {"prompt_field": "a", "response_field": "b", "packing": False},
    ],
)
def test_values_that_are_not_text_are_never_trained_on(
    tmp_path: Path, settings: dict[str, Any], field: str
) -> None:
    """Whatever the kind of samples: Python's spelling of them would be learnt, in silence."""
    good = {"a": "text", "b": "other", "label": 0}
    rows = [json.dumps({**good, **change}) for change in [{}] * 9 + [{field: v} for v in NO_TEXT]]
    path = _write(tmp_path, "a.jsonl", "\n".join(rows) + "\n")
    training, _ = load(
        _config(path, eval_path=path, **{"text_field": None, "label_field": None} | settings)
    )
    assert len(training) == 9
    assert training.notes[: len(NO_TEXT)] == tuple(
        f"note: data.path = {path!r}: 1 row is left out: field '{field}' is "
        f"{type(value).__name__}, not text ({path}:{number})"
        for number, value in enumerate(NO_TEXT, start=10)
    )


def test_rows_without_text_are_left_out_of_running_text_and_named(tmp_path: Path) -> None:
    values = [*NO_TEXT, None]
    rows = [json.dumps({"a": "text"})] * 30
    more = [*rows[:9], *(json.dumps({"a": value}) for value in values), *rows[9:]]
    both = [_write(tmp_path, "a.jsonl", "\n".join(rows))]
    both.append(_write(tmp_path, "b.jsonl", "\n".join(more)))
    choices: dict[str, Any] = {"text_field": "a", "train_sequences": "all", "sequence_length": 4}
    good, bad = (load(DataConfig(path=p, eval_path=p, eval_sequences=1, **choices)) for p in both)
    everything = [part.batch(range(len(part))).inputs_BT.tolist() for part in (good[0], bad[0])]
    assert everything[0] == everything[1]
    for number, (value, note) in enumerate(zip(values, bad[0].notes, strict=True), start=10):
        kind = "is null" if value is None else f"is {type(value).__name__}, not text"
        assert f"1 row is left out: field 'a' {kind} ({both[1]}:{number})" in note


def test_labels_are_text_whole_numbers_or_what_json_spells(tmp_path: Path) -> None:
    rows = [{"t": "x", "l": label} for label in (True, False, "true")]
    path = _write(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config = _config(path, eval_path=path, text_field="t", label_field="l")
    named = config.model_copy(update={"labels": ("false", "true")})
    assert load(named)[0].batch([0, 1, 2]).targets.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match=r"is not a whole number; .*a.jsonl:1 has True, .*'true'"):
        load(config)
    wrong = _write(tmp_path, "b.jsonl", json.dumps({"t": "x", "l": 1.0}) + "\n")
    with pytest.raises(ValueError, match=r"is float, not a label of text"):
        load(config.model_copy(update={"path": wrong}))


def test_bad_rows_are_counted_by_reason_and_left_out(tmp_path: Path) -> None:
    """The others keep their places: every tenth row is held out, whatever is wrong with some."""
    good = [{"t": f"text {n:02d}", "l": n % 2} for n in range(40)]
    lines = [json.dumps(row) for row in good]
    wrong = {3: {"l": 2}, 4: {"l": "yes"}, 15: {"l": "no"}, 16: {"t": None}, 29: {"t": " "}}
    for number, change in wrong.items():
        lines[number] = json.dumps(good[number] | change)
    lines[30:33] = '{"t": "cut', "[1, 2]", '{"l": 0}'
    lines[33] = json.dumps({"t": "half a \ud800", "l": 0})
    path = _write(tmp_path, "a.jsonl", "\n".join(lines))
    config = _config(path, text_field="t", label_field="l")
    training, held_out = load(config)
    kept = [n for n in range(40) if n not in {*wrong, 30, 31, 32, 33}]
    assert _texts(training) == [(f"text {n:02d}", n % 2) for n in kept if n % 10 != 9]
    assert _texts(held_out) == [(f"text {n:02d}", n % 2) for n in kept if n % 10 == 9]
    expected = (
        f"1 row is left out: field 'l' is not one of labels 0 to 1, which model.classes = 2 "
        f"allows ({path}:4 has 2)",
        f"2 rows are left out: field 'l' is not a whole number; name the labels in data.labels "
        f"({path}:5 has 'yes', {path}:16 has 'no')",
        f"1 row is left out: field 't' is null ({path}:17)",
        f"1 row is left out: field 't' is blank ({path}:30)",
        f"1 row is left out: not JSON (Unterminated string starting at) ({path}:31)",
        f"1 row is left out: not a JSON object with fields ({path}:32)",
        f"1 row is left out: no field 't' ({path}:33)",
        f"1 row is left out: field 't' holds an unpaired surrogate ({path}:34)",
    )
    assert training.notes == tuple(f"note: data.path = {path!r}: {note}" for note in expected)


@pytest.mark.parametrize(
    "kind",
    [
        {"text_field": "t"},
        {"text_field": "t", "packing": True},
        {"prompt_field": "q", "response_field": "t"},
    ],
)
def test_mixtures_follow_the_weights(tmp_path: Path, kind: dict[str, Any]) -> None:
    rows = {name: json.dumps({"t": name * 16, "q": "?"}) + "\n" for name in "ab"}
    paths = [_write(tmp_path, f"{name}.jsonl", row * 200) for name, row in rows.items()]
    choices: dict[str, Any] = {
        "sources": [{"path": path, "weight": w} for path, w in zip(paths, (3, 1), strict=True)],
        "sequence_length": 32,
        "train_sequences": "all",
        "eval_sequences": "all",
        **kind,
    }
    training, held_out = load(DataConfig(**choices), seed=3)
    counts = [
        [bytes(part.batch(range(len(part))).inputs_BT.flatten().tolist()).count(b) for b in b"ab"]
        for part in (training, held_out)
    ]
    (first, second), (first_held_out, second_held_out) = counts
    assert first == pytest.approx(3 * second, rel=0.02)
    assert first == pytest.approx(180 * 16, rel=0.07)  # the scarcest for its weight is used up
    assert first_held_out == pytest.approx(second_held_out, rel=0.1)
    again, other = (load(DataConfig(**choices), seed=seed)[0].digest for seed in (3, 4))
    assert training.digest == again != other


def test_a_tokenizer_larger_than_the_model_is_rejected(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.txt", "text " * 100)
    with pytest.raises(ValueError, match=r"model.vocab = 99: .* has 256 tokens; set .* = 256"):
        load(DataConfig(path=path, sequence_length=8), vocab=99)


def test_pairs_of_a_data_set_are_read(tmp_path: Path) -> None:
    """A folder stands for one of the hub: the package reads both alike."""
    labels = {"train": (0, 1), "validation": (1,), "test": (-1,)}
    for split, numbers in labels.items():
        rows = [{"question": "Q?", "sentence": "S.", "label": number} for number in numbers]
        _write(tmp_path, f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    names = {"text_field": "question", "pair_field": "sentence", "label_field": "label"}
    config = _config(f"hf:{tmp_path}", **names, sequence_length=128)
    training, held_out = load(config)
    assert _texts(training) == [("Q?\0S.", 0), ("Q?\0S.", 1)]
    assert _texts(held_out) == [("Q?\0S.", 1)]
    with pytest.raises(ValueError, match=r"no field 'answer' among \['ques"):
        load(config.model_copy(update={"label_field": "answer"}))


SEVERAL = Labelling(3, "multi_label_classification")
NUMBER, NUMBERS = Labelling(1, "regression"), Labelling(2, "regression")


def targets(folder: Path, given: list[Any], labelling: Labelling, **more: Any) -> list[Any]:
    rows = [json.dumps({"t": "x", "l": label}) + "\n" for label in given]
    path = _write(folder, "rows.jsonl", "".join(rows))
    config = _config(path, eval_path=path, text_field="t", label_field="l", **more)
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
