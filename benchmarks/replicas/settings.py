"""What is trained in comparisons of methods: model, text and number of steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.fidelity.finetuning import Corpus, Scale, sequences
from benchmarks.harness import write_tokenizer

GPT2 = Scale(
    layers=7,
    width=320,
    heads=5,
    tokens=128,
    vocab=5000,
    pretrain_steps=640,
    pretrain_batch=8,
    pretrain_lr=1e-3,
    sequences=1536,
    epochs=1,
    batch=8,
    lr=3e-4,
    held_out=256,
)
"""GPT-2's shape with 11.9 M parameters and subwords; one pass."""


def shortened(scale: Scale, share: float) -> Scale:
    """The same with a share of the steps; fewer than all are evaluated on half of the text."""
    if share == 1:
        return scale
    return replace(
        scale,
        sequences=int(scale.sequences * share),
        held_out=scale.held_out // 2,
        pretrain_steps=int(scale.pretrain_steps * share),
    )


def read_corpus(scale: Scale, texts: Sequence[Path]) -> Corpus:
    """Cut a text to pretrain on and one to tune on into sequences of subwords.

    A tokenizer is learnt from both.

    Raises:
        ValueError: a text is too short.
    """
    first, second = texts
    with TemporaryDirectory() as folder:
        both = Path(folder) / "both.txt"
        both.write_bytes(first.read_bytes() + second.read_bytes())
        write_tokenizer(Path(folder), both, vocab=scale.vocab)
        pretraining, _ = sequences(first, scale, "all", 1, tokenizer=folder)
        tuned = sequences(second, scale, scale.sequences, scale.held_out, tokenizer=folder)
        return Corpus(pretraining, *tuned)
