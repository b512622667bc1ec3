"""What is trained in comparisons of methods: model, text and number of steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.fidelity.finetuning import Corpus, Scale, sequences
from benchmarks.fidelity.sentences import write_tokenizer
from thinpipe.launch.data.reading.files import find_files

_STDLIB_NBYTES, _BYTES = 3_000_000, 256


@dataclass(frozen=True)
class Setting:
    """A model that is pretrained on one text and tuned on another, by replicas.

    With `evaluate_tuned` it is also evaluated on the text that it was tuned on, and with `bf16` it
    is tuned in bf16 (weights stay in fp32; losses are evaluated in fp32).
    """

    name: str
    scale: Scale
    evaluate_tuned: bool = True
    bf16: bool = False


GPT2 = Setting(
    "gpt2",
    Scale(
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
    ),
    evaluate_tuned=False,
    bf16=True,
)
"""GPT-2's shape with 11.9 M parameters and subwords; one pass."""

WIDE = replace(GPT2, name="wide", scale=replace(GPT2.scale, width=512, heads=8))
"""The same at width 512, with 27 M parameters."""

BYTES = Setting(
    "bytes",
    Scale(layers=4, width=128, sequences=8192, epochs=1, lr=1e-3),
)
"""A byte-level decoder with 0.8 M parameters; one pass."""

SETTINGS = {setting.name: setting for setting in (GPT2, WIDE, BYTES)}


def shortened(setting: Setting, share: float) -> Setting:
    """The same with a share of the steps; fewer than all are evaluated on half of the text."""
    if share == 1:
        return setting
    scale = setting.scale
    fewer = replace(
        scale,
        sequences=int(scale.sequences * share),
        held_out=scale.held_out // 2,
        pretrain_steps=int(scale.pretrain_steps * share),
    )
    return replace(setting, scale=fewer)


def read_corpus(setting: Setting, texts: Sequence[Path]) -> Corpus:
    """Cut a text to pretrain on and one to tune on into sequences.

    Without texts they are the halves of some sources of Python's standard library. A tokenizer for
    subwords is learnt from both.

    Raises:
        ValueError: texts are missing, too short, or of another number.
    """
    if len(texts) not in (0, 2):
        raise ValueError(f"{len(texts)} texts: name two, to pretrain on and to tune on, or none")
    scale = setting.scale
    with TemporaryDirectory() as folder:
        if not texts:
            texts = _halves(Path(folder))
        options = {}
        if scale.vocab > _BYTES:
            both = Path(folder) / "both.txt"
            both.write_bytes(b"".join(text.read_bytes() for text in texts))
            write_tokenizer(Path(folder), both, vocab=scale.vocab)
            options = {"tokenizer": folder}
        first, _ = sequences(texts[0], scale, "all", 1, **options)
        tuned = sequences(texts[1], scale, scale.sequences, scale.held_out, **options)
        return Corpus(first, *tuned)


def _halves(folder: Path) -> list[Path]:
    joined = b"".join(file.read_bytes() for file in find_files(None, "text"))
    halves = [folder / "first.txt", folder / "second.txt"]
    for half, start in zip(halves, (0, _STDLIB_NBYTES // 2), strict=True):
        half.write_bytes(joined[start : start + _STDLIB_NBYTES // 2])
    return halves
