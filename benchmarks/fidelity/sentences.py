"""A tokenizer learned from a text."""

from pathlib import Path


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
