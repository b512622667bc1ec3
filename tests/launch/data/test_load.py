import itertools
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.documents import Document, Listed
from thinpipe.launch.data.load import files, load
from thinpipe.launch.data.sample_set import SampleSet, WindowSet


def _set(n: int = 5, length: int = 3) -> WindowSet:
    rows = np.arange(n * (length + 1), dtype=np.int32).reshape(n, length + 1)
    return WindowSet(Listed([Document(row) for row in rows]))


@pytest.mark.parametrize("ids", [[3, 0], torch.tensor([3, 0]), torch.tensor([3, 0]).int()])
def test_targets_are_the_inputs_shifted_by_one(ids: list[int] | Tensor) -> None:
    batch = _set().batch(ids)
    inputs, targets = batch.inputs_BT, batch.targets
    assert batch.ids_B.tolist() == [3, 0]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[12, 13, 14], [0, 1, 2]]
    assert targets.tolist() == [[13, 14, 15], [1, 2, 3]]


@pytest.mark.parametrize("wrong", [-1, 5])
def test_ids_out_of_range_are_rejected(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"ids \[{wrong}\]: .* 5 sequences; use ids from 0 to 4"):
        _set().batch([0, wrong])


def _numbered(first: int, lines: int) -> bytes:
    return b"".join(b"%07d\n" % number for number in range(first, first + lines))


def _folder(root: Path, sizes: list[int]) -> Path:
    """Write one file per size; every 8-byte line of the whole folder is different."""
    first = 0
    for index, lines in enumerate(sizes):
        (root / f"{index:03d}.txt").write_bytes(_numbered(first, lines))
        first += lines
    return root


def _config(path: Path | str, **changes: Any) -> DataConfig:
    small: dict[str, Any] = {"sequence_length": 16, "train_sequences": "all", "eval_sequences": 2}
    return DataConfig(path=str(path), **(small | changes))


def _tokens(sequences: SampleSet) -> Tensor:
    batch = sequences.batch(range(len(sequences)))
    return torch.cat([batch.inputs_BT, batch.targets[:, -1:]], dim=1)


def _lines(sequences: SampleSet) -> set[bytes]:
    """The numbered lines that the inputs hold: sequences of 16 bytes are two lines each."""
    inputs_BT = sequences.batch(range(len(sequences))).inputs_BT
    return {bytes(line) for row in inputs_BT.tolist() for line in (row[:8], row[8:])}


@pytest.mark.parametrize(
    "sizes", [[200], [100, 100], [40] * 10, [20] * 35, [200] + [1] * 30, [1] * 9 + [500]]
)
def test_evaluation_text_is_disjoint_from_training_text(tmp_path: Path, sizes: list[int]) -> None:
    training, evaluation = load(_config(_folder(tmp_path, sizes)))
    assert not _lines(training) & _lines(evaluation)
    assert len(_lines(training)) >= 0.8 * sum(sizes) - 2


def test_every_tenth_file_is_held_out(tmp_path: Path) -> None:
    config = _config(_folder(tmp_path, [4] * 20), eval_sequences=3)
    _, evaluation = load(config)
    lines = (_numbered(36, 4) + _numbered(76, 4)).splitlines(keepends=True)
    assert _lines(evaluation) == set(lines[:6])


def test_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(_numbered(0, 100))
    training, evaluation = load(_config(path))
    assert _lines(training) == set(_numbered(0, 88).splitlines(keepends=True))
    assert _lines(evaluation) <= set(_numbered(90, 10).splitlines(keepends=True))


def test_training_text_does_not_depend_on_evaluation(tmp_path: Path) -> None:
    path = _folder(tmp_path, [100, 100])
    few, many = (load(_config(path, eval_sequences=count))[0].digest for count in (1, 9))
    assert few == many


def test_fewer_sequences_are_spread_over_the_text(tmp_path: Path) -> None:
    path = _folder(tmp_path, [1000])
    every, _ = load(_config(path))
    some, _ = load(_config(path, train_sequences=10))
    assert len(some) == 10
    places = [int(bytes(row[:7])) for row in _tokens(some).tolist()]
    gaps = {after - before for before, after in itertools.pairwise(places)}
    assert places[0] == 0
    assert max(gaps) - min(gaps) <= 2
    assert places[-1] > 0.85 * 900
    assert _lines(some) <= _lines(every)


def test_sequences_follow_each_other_without_gaps(tmp_path: Path) -> None:
    tokens = _tokens(load(_config(_folder(tmp_path, [100])))[0])
    assert torch.equal(tokens[1:, 0], tokens[:-1, -1])


def test_folder_file_order_does_not_depend_on_creation(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(_numbered(50, 50))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_bytes(_numbered(0, 50))
    (tmp_path / ".hidden").write_bytes(b"no" * 500)
    training, _ = load(_config(tmp_path))
    assert bytes(_tokens(training)[0].tolist()) == _numbered(0, 2) + b"0"
    assert len(training) == 44


def test_glob_chooses_files(tmp_path: Path) -> None:
    _folder(tmp_path, [50, 50])
    (tmp_path / "skip.bin").write_bytes(b"x" * 1000)
    assert load(_config(tmp_path))[0].digest != load(_config(tmp_path / "*.txt"))[0].digest
    assert len(load(_config(tmp_path / "*.txt"))[0]) == 44


def test_binary_files_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)) * 4)
    training, _ = load(_config(path))
    assert training.batch([15]).inputs_BT.tolist() == [list(range(240, 256))]


def test_max_bytes_limits_the_text(tmp_path: Path) -> None:
    path = _folder(tmp_path, [50, 50, 50])
    training, evaluation = load(_config(path, max_bytes=480))
    assert len(training) == (432 - 1) // 16
    assert max(_lines(training) | _lines(evaluation)) < b"0000060"


def test_text_that_is_not_utf8_is_noted(tmp_path: Path) -> None:
    text, binary = tmp_path / "text", tmp_path / "binary"
    text.write_bytes("été, ça ".encode() * 200)  # some limit below cuts a character
    binary.write_bytes(bytes(range(256)) * 20)
    for limit in (1500, 1501):
        for part in load(_config(text, max_bytes=limit)):
            assert part.notes == ()
    note = "is not UTF-8 text; it is read as plain bytes"
    for part in load(_config(binary)):
        assert part.notes == (f"note: data.path = {str(binary)!r} {note}",)
    training, held_out = load(_config(text, eval_path=str(binary)))
    assert training.notes == ()
    assert held_out.notes == (f"note: data.eval_path = {str(binary)!r} {note}",)


@pytest.mark.parametrize("wrong", [b"\xff", b"\xc3\x28", b"caf\xe9 noir"])
def test_invalid_utf8_is_detected_anywhere(wrong: bytes, tmp_path: Path) -> None:
    text = "日本語".encode() * 130_000  # longer than what is read in one go
    path = tmp_path / "text"
    for content, notes in ((text[1:-1], 0), (text + wrong + text, 1)):
        path.write_bytes(content)
        assert len(load(_config(path))[0].notes) == notes


def test_digest_is_stable_and_changes_with_a_byte(tmp_path: Path) -> None:
    path = _folder(tmp_path, [100])
    before = load(_config(path))[0].digest
    assert load(_config(path))[0].digest == before
    file = path / "000.txt"
    file.write_bytes(file.read_bytes().replace(b"0000040", b"0000041"))
    assert load(_config(path))[0].digest != before


def test_standard_library_is_the_default() -> None:
    start = time.process_time()
    training, evaluation = load(DataConfig())
    assert time.process_time() - start < 3
    assert (len(training), len(evaluation)) == (512, 64)
    assert training.batch([0, 511]).inputs_BT.shape == (2, 128)
    everything, _ = load(DataConfig(train_sequences="all"))
    assert len(everything) * 128 > 1e6


def test_standard_library_leaves_out_what_differs_between_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("test", "a/tests", "idlelib/idle_test", "site-packages", "config-3.11-x86"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").write_bytes(b"x" * 100)
    (tmp_path / "_sysconfigdata__linux.py").write_bytes(b"x" * 100)
    (tmp_path / "notes.txt").write_bytes(b"x" * 100)
    (tmp_path / "a" / "testing.py").write_bytes(_numbered(0, 100))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    small = DataConfig(sequence_length=16, train_sequences="all", eval_sequences=1)
    assert _lines(load(small)[0]) == set(_numbered(0, 88).splitlines(keepends=True))


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (b"", {}, r"data.path = '.*text': the text is empty"),
        (b"0123456789", {}, r"data.sequence_length = 16: .*text' leaves 9 bytes .* takes 17; use"),
        (b"0123456789" * 10, {}, r"sequence_length = 16: .* 10 bytes for eval_sequences .* 17"),
        (b"0123456789" * 50, {"train_sequences": 99}, r"data.train_sequences = 99: .* at most 28"),
        (b"0123456789" * 30, {"eval_sequences": 99}, r"gives 1 for it; use at most 1"),
        (b"0123456789" * 50, {"eval_sequences": 99}, r"data.eval_sequences = 99: .* at most 3"),
    ],
)
def test_too_little_text_is_rejected(
    tmp_path: Path, content: bytes, changes: dict[str, int], message: str
) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(_config(path, **changes))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", r"data.path = '.*missing.txt': no such file or folder"),
        ("pipe", r"data.path = '.*pipe': a device or a pipe; name a file or a folder"),
        ("link", r"data.path = '.*link': a link to nowhere, which does not exist; correct it"),
        ("*.nothing", r"data.path = '.*nothing': no files found"),
        (".", r"data.path = '.*': no files found"),
        ("https://example.org/text.txt", r"URLs are not supported; download the file first"),
    ],
)
def test_paths_without_files_are_rejected(tmp_path: Path, name: str, message: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match=message):
        load(_config(name if "://" in name else tmp_path / name))


def test_files_are_those_of_texts_and_tokenizer(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "held.jsonl", "tokenizer/tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    fields = {"prompt_field": "p", "response_field": "r"}
    sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in "ab"]
    other = {"eval_path": str(tmp_path / "held.jsonl"), "tokenizer": str(tmp_path / "tokenizer")}
    mixed = DataConfig.model_validate({**fields, "sources": sources, **other})
    names = [path.name for path in files(mixed)]
    assert names == ["a.jsonl", "b.jsonl", "held.jsonl", "tokenizer.json"]
    one = DataConfig(path=str(tmp_path / "a.jsonl"))
    assert files(one) == [tmp_path / "a.jsonl"]
    assert files(DataConfig(path="hf:Salesforce/wikitext:wikitext-2-raw-v1")) == []
