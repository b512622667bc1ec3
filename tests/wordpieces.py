"""A tiny tokenizer like BERT's, made without a network: words, special tokens and two types."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def save_wordpieces(folder: Path, words: Sequence[str]) -> Any:
    """Save tokenizer.json and tokenizer_config.json; return the library's tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocab = {word: number for number, word in enumerate([*SPECIAL, *words])}
    made = Tokenizer(WordLevel(vocab, "[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    whole.save_pretrained(folder)
    return whole
