"""What is made once on a host: by one process, found again, gone on with, made again if damaged."""

import functools
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from thinpipe.launch.data import token_file
from thinpipe.launch.data.config import DataConfig
from thinpipe.launch.data.load import load
from thinpipe.launch.data.reading import digests
from thinpipe.launch.data.token_file import TokenFile
from thinpipe.launch.data.tokens import pieces, running, store
from thinpipe.launch.data.tokens.pieces import Cutter
from thinpipe.launch.data.tokens.store import check_room, key_of, obtain
from thinpipe.launch.host import cache

TEXT = "".join(f"{number:06d} a line of text, and another one\n" for number in range(1500))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def _read(folder: Path) -> str:
    return (folder / "made").read_text(encoding="utf-8")


def _make(folder: Path) -> None:
    folder.mkdir()
    (folder / "made").write_text("content")


def test_one_makes_what_several_want() -> None:
    made = list[int]()

    def make(folder: Path) -> None:
        made.append(1)
        time.sleep(0.2)
        _make(folder)

    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: obtain(key_of("x"), _read, make, what=""), range(4))]
    assert found == ["content"] * 4
    assert made == [1]


def test_one_that_is_stopped_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_SILENT_S", 0.2)
    begun, over = threading.Event(), threading.Event()

    def stuck(folder: Path) -> None:
        begun.set()
        over.wait(30)
        _make(folder)

    said = r"path = 'x': another process has .*ab.lock and wrote"
    with ThreadPoolExecutor(1) as other:
        other.submit(obtain, "ab", _read, stuck, what="")
        begun.wait(30)
        with pytest.raises(TimeoutError, match=said):
            obtain("ab", _read, stuck, what="data.path = 'x'")
        over.set()
    assert "data.path = 'x': waiting for another process" in caplog.text


def test_wrong_data_leave_nothing_behind(own_cache: Path) -> None:
    def make(folder: Path) -> None:
        folder.mkdir()
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        obtain("ab", _read, make, what="x")
    assert [path.suffix for path in (own_cache / "tokens").iterdir()] == [".lock"]


def test_what_nobody_opened_for_a_month_is_removed(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    for key in ("aa", "bb"):
        obtain(key, _read, _make, what="x")
    assert {path.name for path in _made(own_cache / "tokens")} == {"aa", "bb"}
    monkeypatch.setattr(store, "_UNUSED_S", -60.0)
    obtain("cc", _read, _make, what="x")
    assert {path.name for path in _made(own_cache / "tokens")} == {"cc"}


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"x: its cache .*file.* THINPIPE_CACHE=\.\.\."):
        obtain("aa", _read, Path.mkdir, what="x")


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(tmp_path: Path) -> None:
    room = shutil.disk_usage(tmp_path).free
    check_room(tmp_path / "tokens", room // 2, "data.path = 'x'")
    with pytest.raises(OSError, match=r"data.path = 'x': takes about .* free; free disk space, or"):
        check_room(tmp_path / "tokens", 2 * room, "data.path = 'x'")
    assert list(tmp_path.iterdir()) == []


def _folder(tmp_path: Path, **changes: Any) -> tuple[DataConfig, Path]:
    (tmp_path / "text.txt").write_text(TEXT)
    choices: dict[str, Any] = {
        "path": str(tmp_path / "text.txt"),
        "eval_path": str(tmp_path / "text.txt"),
        "sequence_length": 16,
        "train_sequences": "all",
        "eval_sequences": "all",
    }
    return DataConfig(**(choices | changes)), tmp_path / "cache" / "tokens"


def _made(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()]


@functools.cache
def _trained() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    found.train_from_iterator([TEXT[:20_000]], trainer)
    return found


def _tokenizer(folder: Path) -> str:
    folder.mkdir()
    _trained().save(str(folder / "tokenizer.json"))
    return str(folder)


def test_an_interrupted_process_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"document_marks": "none", "eval_path": None, "eval_sequences": 1}
    config, folder = _folder(tmp_path, tokenizer=_tokenizer(tmp_path / "tokenizer"), **sizes)
    monkeypatch.setattr(pieces, "_SIZE", 8192)
    monkeypatch.setattr(running, "_BATCH_SIZE", 1)
    monkeypatch.setattr(token_file, "_FLUSH_S", 0.0)
    encode, calls, limit = Cutter.encode, Counter[str](), 10**6

    def counted(self: Cutter, chosen: Any) -> Any:
        calls["all"] += 1
        if calls["all"] > limit:
            raise KeyboardInterrupt
        return encode(self, chosen)

    monkeypatch.setattr(Cutter, "encode", counted)
    whole, needed = load(config)[0].digest, calls["all"]
    shutil.rmtree(tmp_path / "cache")
    calls["all"], limit = 0, 3
    with pytest.raises(KeyboardInterrupt):
        load(config)
    assert [path.suffix for path in _made(folder)] == [".partial"]
    calls["all"], limit = 0, 10**6
    assert load(config)[0].digest == whole
    assert calls["all"] == needed - 3


def test_damage_is_found_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, folder = _folder(tmp_path)
    whole = load(config)[0].digest
    (made,) = _made(folder)
    content = bytearray((made / "tokens").read_bytes())
    content[len(content) // 3] ^= 4
    (made / "tokens").write_bytes(content)
    assert load(config)[0].digest == whole
    assert "tokens: not what was written; it is made again" in caplog.text
    assert TokenFile.open(made).size == len(TEXT)


def test_one_process_of_a_host_looks_for_damage_and_others_trust_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = _folder(tmp_path)
    load(config)
    (made,) = _made(folder)
    monkeypatch.setattr(digests, "_REMEMBERED_NBYTES", 0)
    monkeypatch.setattr(digests, "_SETTLED_S", -1.0)
    looked, digest = list[str](), digests._digest

    def slow(path: Path) -> str:
        looked.append(path.name)
        time.sleep(0.05)
        return digest(path)

    monkeypatch.setattr(digests, "_digest", slow)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(TokenFile.open, [made] * 4))
    assert sorted(looked) == ["rows", "stops", "tokens"]
    monkeypatch.setattr(token_file, "_TRUSTED_S", 0.0)
    TokenFile.open(made)
    assert len(looked) == 6
    monkeypatch.setenv(cache.CACHE, "/proc/none")
    TokenFile.open(made)  # where nothing can be remembered
    assert len(looked) == 9


def test_the_next_run_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = _folder(tmp_path)
    load(config)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("tokens")}
    load(config.model_copy(update={"sequence_length": 32}))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("tokens")} == before
    (tmp_path / "text.txt").write_text(TEXT.replace("another", "some other"))
    load(config)
    assert len(_made(folder)) == 2


def test_one_that_reads_for_long_before_it_writes_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "_SILENT_S", 2.0)
    monkeypatch.setattr(store, "_ALIVE_S", 0.05)
    begun, over = threading.Event(), threading.Event()

    def reads_first(folder: Path) -> None:
        begun.set()
        over.wait(30)
        _make(folder)

    with ThreadPoolExecutor(2) as threads:
        makers = [threads.submit(obtain, "cd", _read, reads_first, what="")]
        begun.wait(30)
        makers.append(threads.submit(obtain, "cd", _read, reads_first, what=""))
        done, _ = wait(makers, 3)  # longer than a silent one is waited for
        over.set()
        assert not done
        assert [maker.result(30) for maker in makers] == ["content"] * 2
