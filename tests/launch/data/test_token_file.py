"""Token files: what was written comes back, goes on after an interruption, and damage is found."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from thinpipe.launch.data.documents import Document, Rejected
from thinpipe.launch.data.token_file import DamagedError, TokenFile, TokenWriter

DOCUMENTS = [Document(np.arange(n, dtype=np.int32) * 7 % 251) for n in (5, 0, 3, 70_000, 1)]


def _write(folder: Path, ids: int = 256) -> TokenFile:
    writer = TokenWriter(folder, ids=ids)
    for row, document in enumerate(DOCUMENTS):
        writer.add(document, 2 * row)
    writer.reject(Rejected("a.jsonl, row 1", "field 'text' is null"))
    writer.finish({"source": "a.jsonl"})
    return TokenFile.open(folder)


@pytest.mark.parametrize(("ids", "nbytes"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
def test_documents_come_back(tmp_path: Path, ids: int, nbytes: int) -> None:
    found = _write(tmp_path, ids)
    assert (tmp_path / "tokens").stat().st_size == nbytes * found.size
    assert found.lengths.tolist() == [len(document) for document in DOCUMENTS]
    assert found.rows.tolist() == [0, 2, 4, 6, 8]
    for number, document in enumerate(DOCUMENTS):
        read = found.read(number)
        assert read.tokens.dtype == np.int32
        assert np.array_equal(read.tokens, document.tokens)
        assert read.counts is None
    assert found.rejected == {"field 'text' is null": [1, ["a.jsonl, row 1"]]}
    assert found.facts == {"source": "a.jsonl"}
    with pytest.raises(IndexError, match="document 5 of 5"):
        found.read(5)


def test_a_writer_goes_on_where_it_was_flushed(tmp_path: Path) -> None:
    whole = _write(tmp_path / "whole")
    with closing(TokenWriter(tmp_path / "part", ids=256)) as writer:
        for row, document in enumerate(DOCUMENTS[:3]):
            writer.add(document, 2 * row)
        writer.reject(Rejected("a.jsonl, row 1", "field 'text' is null"))
        writer.flush(3)
        writer.add(DOCUMENTS[0], 99)  # not flushed: as if it had been killed
    with pytest.raises(FileNotFoundError):
        TokenFile.open(tmp_path / "part")
    again = TokenWriter(tmp_path / "part", ids=256)
    assert again.done == 3
    for row in (3, 4):
        again.add(DOCUMENTS[row], 2 * row)
    again.finish({"source": "a.jsonl"})
    assert TokenFile.open(tmp_path / "part").digest == whole.digest


@pytest.mark.parametrize("name", ["tokens", "stops", "rows"])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    _write(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DamagedError, match=name):
        TokenFile.open(tmp_path)


def test_a_damaged_manifest_is_found(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "manifest.json").write_text('{"version": 2}')
    with pytest.raises(DamagedError, match="cannot be read"):
        TokenFile.open(tmp_path)
