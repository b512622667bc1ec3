"""A process that is killed (kill -9) at any moment leaves nothing that the next one takes wrong."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.data.tokens.test_store import TEXT, _tokenizer
from tests.often import mostly_slow
from thinpipe.launch.data import token_file
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.load import load
from thinpipe.launch.data.reading import digests
from thinpipe.launch.data.token_file import TokenWriter
from thinpipe.launch.data.tokens import pieces, running, store
from thinpipe.launch.host import cache, disk

MOMENTS = {
    "flush": (disk, "flush"),
    "replace": (disk, "replace"),
    "flush_folder": (disk, "flush_folder"),
    "extend": (TokenWriter, "extend"),
    "digest": (digests, "_digest"),
    "settle": (store, "_settle"),
    "rename": (Path, "rename"),
}
"""What a process is about to do when it is killed."""
ONCE = ("settle", "rename")
"""Done once where training and evaluation are of one file."""
ROWS = [{"q": f"{n} squared?", "a": f"{n * n}", "l": n % 2} for n in range(90)]
ROWS[7]["a"] = ROWS[8]["q"] = ""
KINDS: dict[str, dict[str, Any]] = {
    "text": {"document_marks": "none"},
    "prompts": {"prompt_field": "q", "response_field": "a"},
    "labels": {"text_field": "q", "label_field": "l", "format": "jsonl"},
}


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps, each flushed."""
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(pieces, "_SIZE", 4096)
    monkeypatch.setattr(running, "_BATCH_SIZE", 1)
    monkeypatch.setattr(token_file, "_FLUSH_S", 0.0)


def _config(folder: Path, kind: str) -> DataConfig:
    (folder / "text.txt").write_text(TEXT[:40_000])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return DataConfig(
        path=str(folder / ("text.txt" if kind == "text" else "rows.jsonl")),
        tokenizer=_tokenizer(folder / "tokenizer") if kind == "text" else "bytes",
        sequence_length=32,
        train_sequences="all",
        eval_sequences=1,
        **KINDS[kind],
    )


def _killed(config: DataConfig, owner: Any, name: str, count: int) -> bool:
    """Load in a process that is killed when it calls a function for the n-th time."""
    child = os.fork()
    if child == 0:
        real, calls = getattr(owner, name), [0]

        def counted(*arguments: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **more)

        setattr(owner, name, counted)
        load(config)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def _moments(config: DataConfig, owner: Any, name: str) -> Iterator[int]:
    count = 1
    while _killed(config, owner, name, count):
        yield count
        count += 1 if count < 3 else 17


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "text".__eq__))
@pytest.mark.parametrize("moment", mostly_slow(MOMENTS, "replace".__eq__))
def test_the_next_start_after_a_kill_has_the_same_tokens(
    tmp_path: Path, moment: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, kind)
    training, held_out = load(config)
    expected = training.digest, held_out.digest, training.notes
    shutil.rmtree(tmp_path / "cache")
    tried = 0
    for _ in _moments(config, *MOMENTS[moment]):
        tried += 1
        training, held_out = load(config)
        assert (training.digest, held_out.digest, training.notes) == expected
        left = {path.suffix for path in (tmp_path / "cache" / "tokens").iterdir()}
        assert left == {"", ".lock"}
        shutil.rmtree(tmp_path / "cache")
    assert tried >= (1 if moment in ONCE else 2)
    assert "waiting" not in caplog.text
    assert "made again" not in caplog.text


def test_kills_one_after_the_other_come_to_an_end(tmp_path: Path) -> None:
    """Each process gets a little further than the one before."""
    config = _config(tmp_path, "text")
    whole = load(config)[0].digest
    shutil.rmtree(tmp_path / "cache")
    kills = 0
    while _killed(config, TokenWriter, "flush", 2):
        kills += 1
        assert kills < 99
    assert kills > 3
    assert load(config)[0].digest == whole
