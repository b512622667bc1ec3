"""Text as fixed training sequences whose ids mean the same bytes on every peer and at every resume.

Axes: N sequences of a set, B samples of a batch, T tokens. A sequence holds T + 1 tokens: the
targets are the inputs moved on by one.
"""

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

_HF_PREFIX = "hf:"
_HELD_OUT = 10  # one in so many files, or the last of so many equal parts of the text
# Tests, what is installed, and generated modules, which differ between machines with one Python.
_STDLIB_SKIPPED = re.compile(
    r"(tests?|idle_test|site-packages|dist-packages|__pycache__|config-.*)$|_sysconfigdata"
)


class DataConfig(BaseModel):
    """What text to train on and how it is cut into sequences.

    `path` is a file, a folder (with what is below it, hidden names left out) or a glob; `dataset`
    is `hf:NAME/CONFIG` or `hf:OWNER/NAME/CONFIG`; without either, the text is the source code of
    Python's standard library. `sequence_length` is in tokens, `max_bytes` limits how much of the
    text is read, `train_sequences = "all"` takes all that the text holds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | None = Field(default=None, min_length=1)
    dataset: str | None = None
    sequence_length: int = Field(default=128, ge=1)
    train_sequences: Annotated[int, Field(ge=1)] | Literal["all"] = 512
    eval_sequences: int = Field(default=64, ge=1)
    tokenizer: Literal["bytes"] = "bytes"
    max_bytes: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        if self.path is not None and self.dataset is not None:
            raise ValueError(
                f"path = {self.path!r}, dataset = {self.dataset!r}: two sources of text; remove one"
            )
        if self.dataset is not None:
            _parse_dataset(self.dataset)
        return self

    @property
    def source(self) -> str:
        """Return the setting that chooses the text, as error messages quote it."""
        if self.dataset is not None:
            return f"data.dataset = {self.dataset!r}"
        return f"data.path = {self.path!r}"


class SequenceSet:
    """Sequences with ids 0 to N - 1; `tokens` is an integer tensor [N, T + 1], kept, not copied."""

    def __init__(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)}: a set needs [N, T + 1] with T at least 1"
            )
        self._tokens = tokens

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self._tokens)

    def batch(self, ids: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 [B, T] on the CPU, in the order of `ids`.

        Raises:
            ValueError: an id is negative or past the last sequence.
        """
        ids_B = torch.as_tensor(ids, dtype=torch.int64, device="cpu")
        wrong = ids_B[(ids_B < 0) | (ids_B >= len(self))]
        if len(wrong):
            raise ValueError(
                f"sample ids {wrong[:4].tolist()}: the set holds {len(self)} sequences; "
                f"use ids from 0 to {len(self) - 1}"
            )
        tokens = self._tokens[ids_B].to(torch.int64)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of shape and content: equal when ids mean the same text to both sides."""
        digest = hashlib.sha256(f"{tuple(self._tokens.shape)} {self._tokens.dtype}".encode())
        for tokens in self._tokens:  # row by row: sequences overlap in memory, a copy would not
            digest.update(tokens.numpy())
        return digest.hexdigest()


def load(config: DataConfig) -> tuple[SequenceSet, SequenceSet]:
    """Return the training and the evaluation sequences, cut from texts that do not overlap.

    Raises:
        ValueError: the path is missing, matches nothing or is empty; the text is too short for
            the sequences asked for; the data set has no text column.
        ImportError: `dataset` is set and the optional package is not installed.
    """
    if config.dataset is not None:
        training, held_out = _read_dataset(config.dataset, config.max_bytes)
    else:
        documents = _take(map(Path.read_bytes, _files(config.path)), config.max_bytes)
        training, held_out = _split(documents)
    if not training:
        raise ValueError(f"{config.source}: the text is empty; name one that holds some bytes")
    return (
        _sequences(training, config.train_sequences, config=config, setting="train_sequences"),
        _sequences(held_out, config.eval_sequences, config=config, setting="eval_sequences"),
    )


def _files(path: str | None) -> list[Path]:
    """Regular files of a `data.path`, in an order that is the same on every machine."""
    place = Path(path or sysconfig.get_paths()["stdlib"]).expanduser()
    if path is None:
        files = _stdlib_files(place)
    elif place.is_dir():
        files = [file for file in place.rglob("*") if not _hidden(file.relative_to(place))]
    elif place.is_file():
        files = [place]
    elif glob.has_magic(path):
        files = [Path(name) for name in glob.glob(str(place), recursive=True)]
    else:
        raise ValueError(
            f"data.path = {path!r}: no such file or folder, seen from {Path.cwd()}; "
            f"correct the path or leave it out for the standard library's sources"
        )
    files = sorted((file for file in files if file.is_file()), key=Path.as_posix)
    if not files:
        raise ValueError(f"data.path = {path!r}: no files there; name a file or a folder with some")
    return files


def _stdlib_files(root: Path) -> list[Path]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _STDLIB_SKIPPED.match(name)]
        sources = (name for name in names if name.endswith(".py"))
        files += [Path(folder, name) for name in sources if not _STDLIB_SKIPPED.match(name)]
    return files


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _take(documents: Iterable[bytes], limit: int | None) -> list[bytes]:
    """Documents in order until `limit` bytes, the last one cut short."""
    if limit is None:
        return list(documents)
    kept: list[bytes] = []
    for document in documents:
        kept.append(document[:limit])
        limit -= len(kept[-1])
        if limit == 0:
            break
    return kept


def _split(documents: list[bytes]) -> tuple[bytes, bytes]:
    """Training and held-out text, the same whatever number of sequences is asked for.

    Held out is every tenth document, spread over the whole text; or, when these are not close to
    a tenth of the bytes, the last tenth of the joined text.
    """
    total = sum(map(len, documents))
    held_out = b"".join(documents[_HELD_OUT - 1 :: _HELD_OUT])
    if total / (2 * _HELD_OUT) <= len(held_out) <= 2 * total / _HELD_OUT:
        rest = [text for i, text in enumerate(documents) if i % _HELD_OUT != _HELD_OUT - 1]
        return b"".join(rest), held_out
    text = b"".join(documents)
    end = len(text) - len(text) // _HELD_OUT
    return text[:end], text[end:]


def _sequences(
    text: bytes, count: int | Literal["all"], *, config: DataConfig, setting: str
) -> SequenceSet:
    length = config.sequence_length
    available = (len(text) - 1) // length
    found = f"the text of {config.source} leaves {len(text)} bytes for {setting}"
    if available < 1:
        raise ValueError(
            f"data.sequence_length = {length}: {found} and one sequence takes {length + 1}; "
            f"use a longer text or shorter sequences"
        )
    count = available if count == "all" else count
    if count > available:
        raise ValueError(
            f"data.{setting} = {count}: {found}, enough for {available} sequences of {length}; "
            f"use at most {available}, a longer text or shorter sequences"
        )
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, length + 1, length)
    if count == available:
        return SequenceSet(windows)
    return SequenceSet(windows[torch.arange(count) * available // count])


def _parse_dataset(dataset: str) -> tuple[str, str]:
    parts = dataset.removeprefix(_HF_PREFIX).split("/")
    if not dataset.startswith(_HF_PREFIX) or len(parts) not in (2, 3) or not all(parts):
        raise ValueError(
            f"dataset = {dataset!r}: not of the form hf:NAME/CONFIG or hf:OWNER/NAME/CONFIG; "
            f"write for example hf:wikitext/wikitext-2-raw-v1"
        )
    return "/".join(parts[:-1]), parts[-1]


def _read_dataset(dataset: str, limit: int | None) -> tuple[bytes, bytes]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ImportError(
            f"data.dataset = {dataset!r}: the package 'datasets' is not installed; "
            f"run `pip install thinpipe[datasets]` or set data.path to local text"
        ) from error
    name, subset = _parse_dataset(dataset)
    splits = load_dataset(name, subset)
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    for split in filter(None, ("train", held_out)):
        if split not in splits or "text" not in splits[split].column_names:
            raise ValueError(
                f"data.dataset = {dataset!r}: no column 'text' in a split '{split}'; "
                f"use another data set or export its text to a file for data.path"
            )
    training = b"".join(_take(map(_line, splits["train"]["text"]), limit))
    if held_out is None:
        return _split([training])
    return training, b"".join(_take(map(_line, splits[held_out]["text"]), limit))


def _line(row: str) -> bytes:
    return (row if row.endswith("\n") else row + "\n").encode()
