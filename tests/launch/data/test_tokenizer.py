"""Tokenizers from folders give their package's ids; bytes are bytes."""

import json
from pathlib import Path

import pytest

from thinpipe.launch.data.tokenizer import Bytes, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXT = "low lower lowest, the newest and the widest: low tide é 日本"


def _trained(folder: Path, *, specials: list[str]) -> Path:
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [TEXT] * 4, vocab_size=300, min_frequency=1, special_tokens=specials, show_progress=False
    )
    folder.mkdir()
    tokenizer.save_model(str(folder))
    return folder


def test_vocabulary_with_merges_round_trips(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(_trained(tmp_path / "t", specials=["<|endoftext|>"])))
    whole = tokenizers.ByteLevelBPETokenizer(
        str(tmp_path / "t/vocab.json"), str(tmp_path / "t/merges.txt")
    )
    ids = tokenizer.encode(TEXT)
    assert ids == tokenizer.encode(TEXT) == whole.encode(TEXT).ids
    assert whole.decode(ids) == TEXT
    assert len(ids) < len(TEXT)
    assert max(ids) < tokenizer.vocab == whole.get_vocab_size()
    assert tokenizer.end == whole.token_to_id("<|endoftext|>")


def test_tokenizer_json_adds_its_special_tokens_to_samples_only(tmp_path: Path) -> None:
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {"[CLS]": 0, "[SEP]": 1, "yes": 2, "no": 3, "[UNK]": 4}, unk_token="[UNK]"
    ))  # fmt: skip
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    whole.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("yes no") == [2, 3]
    assert tokenizer.fitted("yes", None, 99).ids == [0, 2, 1]
    assert tokenizer.fitted("yes", "no", 99).ids == [0, 2, 1, 3, 1]
    assert tokenizer.end == 1


def test_the_configured_end_comes_first(tmp_path: Path) -> None:
    folder = _trained(tmp_path / "t", specials=["<|endoftext|>", "<stop>"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert load_tokenizer(str(folder)).end == 1


def test_no_end_is_an_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(_trained(tmp_path / "t", specials=[])))
    with pytest.raises(ValueError, match=r"no end-of-sequence token; name one as eos_token"):
        _ = tokenizer.end


def test_bytes_need_nothing() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, Bytes)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.fitted("a", "b", 99).ids == [97, tokenizer.end, 98]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (None, r"data.tokenizer = '.*words': no such folder"),
        ("notes.txt", r"holds neither tokenizer.json nor vocab.json with merges.txt"),
        ("tokenizer.json", r"data.tokenizer = '.*words': cannot be read"),
    ],
)
def test_folders_without_a_tokenizer_are_rejected(
    tmp_path: Path, make: str | None, message: str
) -> None:
    folder = tmp_path / "words"
    if make is not None:
        folder.mkdir()
        (folder / make).write_text("{}")
    with pytest.raises(ValueError, match=message):
        load_tokenizer(str(folder))
