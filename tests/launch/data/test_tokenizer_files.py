"""Tokenizers as their folders have them: nothing cut unasked, no space of their own, all ends."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ran
from tests.wordpieces import save_wordpieces
from thinpipe.launch.data.tokenizer import Bytes, FolderTokenizer, load_tokenizer
from thinpipe.launch.data.tokenizer_files import has_tokenizer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import decoders, models, normalizers, pre_tokenizers  # noqa: E402

TEXT = "a0: b, and the newest é of all things said here"
END = "<\uff5cend\u2581of\u2581text\uff5c>"  # as DeepSeek spells its marks


def _bpe(*, vocab_size: int = 120, specials: tuple[str, ...] = (END,), **parts: Any) -> Any:
    found = tokenizers.Tokenizer(models.BPE(byte_fallback=False, unk_token=None))
    for name, part in parts.items():
        setattr(found, name, part)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(specials), show_progress=False
    )
    found.train_from_iterator([TEXT, "b", " b", "self name"] * 4, trainer)
    return found


def _saved(folder: Path, tokenizer: Any, **files: Any) -> FolderTokenizer:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    found = load_tokenizer(str(folder))
    assert isinstance(found, FolderTokenizer)
    return found


def _metaspace(scheme: str) -> dict[str, Any]:
    return {
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme=scheme),
        "decoder": decoders.Metaspace(prepend_scheme=scheme),
    }


def _of_bytes(*, add_prefix_space: bool) -> dict[str, Any]:
    before = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    return {"pre_tokenizer": before, "decoder": decoders.ByteLevel()}


SPACED: dict[str, dict[str, Any]] = {
    "metaspace first": _metaspace("first"),
    "metaspace always": _metaspace("always"),
    "in a sequence": {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")]
        ),
        "decoder": decoders.Metaspace(prepend_scheme="first"),
    },
    "prepend": {  # as Llama 2 has it
        "normalizer": normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        ),
        "decoder": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    },
    "bytes with a space": _of_bytes(add_prefix_space=True),
    "bytes": _of_bytes(add_prefix_space=False),
}


@pytest.mark.parametrize("kind", SPACED)
def test_no_space_comes_between_a_prompt_and_its_answer(kind: str, tmp_path: Path) -> None:
    tokenizer = _saved(tmp_path / "t", _bpe(**SPACED[kind]))
    for prompt, response in (("a0:", "b"), ("a0:", " b"), ("self", " name"), ("a0: ", "b")):
        ids = [*tokenizer.encode(prompt), *tokenizer.encode(response, after=True)]
        assert tokenizer.decode(ids).lstrip() == prompt + response


def test_a_unigram_model_that_strips_keeps_the_space_of_an_answer(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("a", -3.0), ("b", -3.0), ("▁b", -3.5), ("▁a", -3.5)]
    whole = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    whole.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFKC()])
    whole.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = _saved(tmp_path / "t", whole)
    answered = tokenizer.encode("a") + tokenizer.encode(" b", after=True)
    assert answered == tokenizer.encode("a b") == [5, 4]
    assert tokenizer.encode("b", after=True) == [3]


def test_truncation_and_padding_of_a_file_are_not_applied(tmp_path: Path) -> None:
    whole = _bpe(**SPACED["bytes"])
    expected = whole.encode(TEXT).ids
    whole.enable_truncation(4)
    whole.enable_padding(length=64, pad_id=0, pad_token=END)
    tokenizer = _saved(tmp_path / "t", whole)
    assert tokenizer.encode(TEXT) == expected
    assert tokenizer.encode("b", after=True) == tokenizer.encode("b")
    assert len(tokenizer.fitted(TEXT, None, 9999).ids) == len(expected)


def test_ids_above_the_number_of_tokens_are_counted(tmp_path: Path) -> None:
    whole = tokenizers.Tokenizer(models.WordLevel({"low": 0, "high": 7, "?": 3}, unk_token="?"))
    tokenizer = _saved(tmp_path / "t", whole)
    assert tokenizer.vocab == 8
    assert tokenizer.holes == (1, 2, 4, 5, 6)


def test_every_listed_end_mark_ends_an_answer(tmp_path: Path) -> None:
    whole = _bpe(specials=(END, "<stop>", "<turn>"), **SPACED["bytes"])
    tokenizer = _saved(
        tmp_path / "t",
        whole,
        tokenizer_config={"eos_token": {"content": "<stop>"}},
        generation_config={"eos_token_id": [2, 1, 0]},
    )
    assert tokenizer.ends == (1, 2, 0)
    assert tokenizer.end == 1
    alone = _saved(tmp_path / "u", whole, generation_config={"eos_token_id": 2})
    assert alone.ends == (2,)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer_config", {"eos_token": "<no>"}, r"eos_token = '<no>': not in the vocabulary"),
        ("generation_config", {"eos_token_id": [0, 999]}, r"= \[0, 999\]: 999 is no token"),
        ("generation_config", {"eos_token_id": "<no>"}, r"'<no>' is no token"),
        ("generation_config", [1], r"generation_config.json: not a JSON object \(list\)"),
    ],
)
def test_an_end_mark_that_is_no_token_is_an_error(
    tmp_path: Path, file: str, content: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _saved(tmp_path / "t", _bpe(**SPACED["bytes"]), **{file: content})


def test_what_a_tokenizer_adds_before_a_text_is_known(tmp_path: Path) -> None:
    whole = _bpe(specials=(END, "<s>"), **SPACED["bytes"])
    assert _saved(tmp_path / "t", whole).begin == ()
    whole.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"<s> $A {END}", special_tokens=[("<s>", 1), (END, 0)]
    )
    assert _saved(tmp_path / "u", whole).begin == (1,)


_IN_ASCII = """
import locale, sys
from thinpipe.launch.data.tokenizer import load_tokenizer
assert locale.getpreferredencoding(False) in ("ANSI_X3.4-1968", "ISO-8859-1"), "not in this locale"
found = load_tokenizer(sys.argv[1])
print(found.end, found.encode("\\u00e9"))
"""


def test_files_are_utf8_in_any_locale(tmp_path: Path) -> None:
    tokenizer = _saved(tmp_path / "t", _bpe(specials=("<a>", "<b>", END), **SPACED["bytes"]))
    file = tmp_path / "t/tokenizer_config.json"
    file.write_text(json.dumps({"eos_token": END}, ensure_ascii=False), encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = ran(sys.executable, "-c", _IN_ASCII, tmp_path / "t", **plain)
    assert done.stdout.strip() == f"2 {tokenizer.encode('é')}"


def test_a_sentencepiece_model_is_converted(tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece")
    pytest.importorskip("transformers")
    (tmp_path / "text").write_text(f"{TEXT}\nself name\n" * 20, encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=60,
        model_type="bpe",
        byte_fallback=False,
        minloglevel=2,
    )
    (tmp_path / "text").unlink()
    config = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert has_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    processor = spm.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert tokenizer.encode(TEXT) == processor.encode(TEXT)
    assert tokenizer.end == processor.eos_id()
    ids = [*tokenizer.encode("a0:"), *tokenizer.encode("b", after=True)]
    assert tokenizer.decode(ids) == "a0:b"


def test_a_model_that_cannot_be_converted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "qwen.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(ValueError, match=r"qwen.tiktoken: .*; save it with .* save_pretrained"):
        load_tokenizer(str(tmp_path))

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError  # without a word

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(ValueError, match=r"cannot convert it: AssertionError; save it with"):
        load_tokenizer(str(tmp_path))


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


def test_no_end_is_an_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(_trained(tmp_path / "t", specials=[])))
    with pytest.raises(ValueError, match=r"no end-of-sequence token; name one as eos_token"):
        _ = tokenizer.end


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
    assert (ours.encode("a b"), ours.end) == (whole.encode("a b", add_special_tokens=False), 3)
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
