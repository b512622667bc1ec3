"""Text and a tokenizer for pretraining a classifier of sentences."""

import re
from collections.abc import Sequence
from pathlib import Path

_ACCEPTABLE, _LABEL, _TEXT = "1", 1, 3  # CoLA's columns


def write_text(path: Path, *, texts: Sequence[Path], labelled: Path) -> None:
    """Acceptable sentences of `labelled`, one per line, then `texts` detokenized."""
    rows = [line.split("\t") for line in labelled.read_text(encoding="utf-8").splitlines()]
    sentences = [row[_TEXT] for row in rows if row[_LABEL] == _ACCEPTABLE]
    path.write_text(
        "\n".join([*sentences, *(_spelled(text.read_text(encoding="utf-8")) for text in texts)]),
        encoding="utf-8",
    )


def write_tokenizer(folder: Path, text: Path, *, vocab: int) -> None:
    """Learn a byte-level BPE of `vocab` tokens from a text; `data.tokenizer` can name the folder.

    Raises:
        ImportError: the package tokenizers is not installed.
    """
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=vocab, show_progress=False)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def _spelled(wikitext: str) -> str:
    """Without WikiText's blanks around punctuation."""
    joined = re.sub(r" @([-,.])@ ", r"\1", wikitext)
    return re.sub(r" ([.,?!;:')])", r"\1", joined)
