"""Texts to train on, and run files that name them."""

import random
from pathlib import Path

WORDS = ["thin ", "pipe ", "sends ", "few ", "bytes ", "over ", "slow ", "links\n"]


def write_squares(path: Path, lines: int = 4000) -> Path:
    """Lines that a small model learns to continue."""
    path.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(lines)), encoding="utf-8")
    return path


def write_words(folder: Path, count: int) -> tuple[Path, Path]:
    """A text to train on and one to evaluate on: so many words, in any order."""
    paths = folder / "train", folder / "eval"
    for seed, path in enumerate(paths, 1):
        text = "".join(random.Random(seed).choices(WORDS, k=count))
        path.write_text(text, encoding="utf-8")
    return paths


def write_run(folder: Path, template: str, *, lines: int = 4000, **values: object) -> Path:
    """`run.toml` with a text and a run folder next to it."""
    values |= {"folder": folder / "run", "text": write_squares(folder / "text.txt", lines)}
    path = folder / "run.toml"
    path.write_text(template.format(**values), encoding="utf-8")
    return path
