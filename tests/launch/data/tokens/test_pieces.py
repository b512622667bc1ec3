"""Text in pieces has the tokens of the whole, whatever tokenizer."""

import functools
import random
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from thinpipe.launch.data.tokens import pieces as module
from thinpipe.launch.data.tokens.pieces import Cutter

_WORDS = [
    *("the", "of", "and", "in", "it's", "naïve", "coöperate", "12", "345", "6789", "x_1", "été"),
    *("日本語", "テスト,", ".", "!", ";", "(", ")", "--", "don't", "We'll", "HELLO"),
    *("Straße", "😀", "👩\u200d👩\u200d👧", "don\u2019t", "a", "b", "c", "foo.bar(baz)"),
    *("==", "!=", "\\n"),
]
_SPACES = [*[" "] * 4, "  ", "\n", "\n\n", "\t", " \n", "\r\n", "   \n    ", "\u00a0", "\u3000"]


def _text(seed: int, words: int) -> str:
    chosen = random.Random(seed)
    return "".join(chosen.choice(_WORDS) + chosen.choice(_SPACES) for _ in range(words))


_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def _made(kind: str) -> Tokenizer:
    """A tokenizer of a family, trained on text of the same sort."""
    unknown: dict[str, Any] = {"unk_token": "<unk>"}
    special = {"special_tokens": ["<unk>", "<end>"], "show_progress": False}
    trainer: Any = trainers.BpeTrainer(vocab_size=600, **special)
    of_bytes = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **special
    )
    if kind == "BPE of bytes":
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        trainer = of_bytes
    elif kind == "BPE by an expression":
        found = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(tokenizers.Regex(_GPT4), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        found.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        found.normalizer = normalizers.NFC()
        trainer = of_bytes
    elif kind == "BPE without splitting":  # as Llama 2
        found = Tokenizer(models.BPE(fuse_unk=True, **unknown))
        found.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        found.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    elif kind == "BPE, Metaspace":
        found = Tokenizer(models.BPE(**unknown))
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        found.decoder = decoders.Metaspace()
    elif kind == "WordPiece":
        found = Tokenizer(models.WordPiece(**unknown))
        found.normalizer = normalizers.BertNormalizer(lowercase=True)
        found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=600, **special)
    else:
        found = Tokenizer(models.Unigram())
        found.normalizer = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
        )
        scheme = "always" if kind == "Unigram, Metaspace always" else "first"
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", **special)
    found.train_from_iterator([_text(seed, 400) for seed in range(3)], trainer)
    if kind == "BPE without splitting":
        found.pre_tokenizer = None  # merges may now reach over spaces
    return found


KINDS = (
    "BPE of bytes",
    "BPE by an expression",
    "BPE without splitting",
    "BPE, Metaspace",
    "WordPiece",
    "Unigram, Metaspace first",
    "Unigram, Metaspace always",
)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(module, "_SIZE", 512)
    monkeypatch.setattr(module, "_SOUGHT", 256)
    backend = _made(kind)
    cutter = Cutter(backend)
    for seed, size in ((10, 100), (12, 10**6)):
        text = _text(seed, 2000)
        whole = backend.encode(text, add_special_tokens=False).ids
        parts = (text[at : at + size] for at in range(0, len(text), size))
        cut = list(cutter.pieces(parts))
        assert len(cut) > len(text) / 2000
        assert "".join(piece.text for piece in cut) == text
        assert not any(piece.forced for piece in cut)
        assert np.concatenate(cutter.encode(cut)).tolist() == whole


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_go_on_behind_a_context(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(module, "_SIZE", 512)
    backend, text = _made(kind), _text(20, 1000)
    cutter = Cutter(backend)
    whole = list(cutter.pieces([text]))
    before = "".join(piece.text for piece in whole[:2])
    rest = cutter.pieces([text[len(before) :]], before[-module.CONTEXT :])
    tokens = [*cutter.encode(whole[:2]), *cutter.encode(list(rest))]
    expected = backend.encode(text, add_special_tokens=False).ids
    assert np.concatenate(tokens).tolist() == expected


def test_special_tokens_and_white_space_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SIZE", 64)
    monkeypatch.setattr(module, "_SOUGHT", 64)
    monkeypatch.setattr(module, "CONTEXT", 32)
    backend = _made("BPE of bytes")
    text = ("<end>" * 3 + "\n\n\n  word" + " " * 9 + "<end> 12345\n") * 60
    cutter = Cutter(backend)
    cut = list(cutter.pieces([text]))
    assert len(cut) > 20
    whole = backend.encode(text, add_special_tokens=False).ids
    assert np.concatenate(cutter.encode(cut)).tolist() == whole


def test_a_text_without_a_place_for_a_cut_is_cut_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SIZE", 64)
    monkeypatch.setattr(module, "_LONGEST", 4)
    cut = list(Cutter(_made("BPE of bytes")).pieces(["-" * 5000]))
    assert "".join(piece.text for piece in cut) == "-" * 5000
    assert any(piece.forced for piece in cut)
