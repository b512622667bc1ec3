"""Text to token ids: bytes, or a tokenizer read from a folder."""

import codecs
import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thinpipe.launch.data.text import first_character
from thinpipe.launch.host.packages import explain

BYTES = "bytes"
_KNOWN_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")


class Fitted(NamedTuple):
    """Texts that fit into a sequence: tokens, their types (0, or 1 in a second text)."""

    ids: list[int]
    types: list[int]
    truncated: bool


class Tokenizer(Protocol):
    """What reading data requires. `vocab` is the number of ids, `unit` what one token is called."""

    vocab: int
    unit: str

    def stream(self, text: bytes) -> Tensor:
        """Running text as ids, 1-d."""

    def encode(self, text: str) -> list[int]:
        """A piece of text, without special tokens."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without special tokens; half a character is U+FFFD."""

    def sample(self, text: str, other: str | None) -> list[int]:
        """One or two texts to classify, with the tokenizer's special tokens."""

    def fitted(self, text: str, other: str | None, length: int) -> Fitted:
        """As `sample`, in at most `length` tokens.

        Of two texts the longer one is truncated first.

        Raises:
            ValueError: special tokens alone take as many.
        """

    @property
    def end(self) -> int:
        """The id that ends an example.

        Raises:
            ValueError: the vocabulary has no such token.
        """


class Bytes:
    """Every byte is a token; byte 0, which text does not hold, ends and separates."""

    vocab = 256
    unit = "bytes"
    end = 0

    def stream(self, text: bytes) -> Tensor:
        """As uint8, without a copy per token."""
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def sample(self, text: str, other: str | None) -> list[int]:
        return self.encode(text if other is None else f"{text}\0{other}")

    def fitted(self, text: str, other: str | None, length: int) -> Fitted:
        first, second = self.encode(text), [] if other is None else self.encode(other)
        marks = [] if other is None else [self.end]
        room = length - len(marks)
        check_room(room, length, len(marks))
        over = len(first) + len(second) - room
        if over > 0 and marks:
            longer = max(len(first), len(second))
            shorter = min(min(len(first), len(second)), room // 2)
            kept = min(longer, room - shorter)
            one = kept if len(first) > len(second) else shorter
            first, second = first[:one], second[: room - one]
        ids = [*first[:room], *marks, *second]
        return Fitted(ids, [0] * len(ids), over > 0)


class FolderTokenizer:
    """A tokenizer.json, or GPT-2's vocab.json and merges.txt, read by the package tokenizers."""

    unit = "tokens"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = _read(folder)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab: int = self._tokenizer.get_vocab_size()

    def stream(self, text: bytes) -> Tensor:
        """Raises ValueError if the text is not UTF-8."""
        try:
            # an incremental decoder leaves out a character that was cut at the end
            decoded = codecs.getincrementaldecoder("utf-8")().decode(text[first_character(text) :])
        except UnicodeDecodeError as error:
            raise ValueError(
                f"data.tokenizer = {str(self._folder)!r}: the text is not UTF-8 ({error}); convert "
                f'it, or use tokenizer = "{BYTES}"'
            ) from None
        return torch.tensor(self.encode(decoded), dtype=torch.int32)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def sample(self, text: str, other: str | None) -> list[int]:
        return list(self._tokenizer.encode(text, other, add_special_tokens=True).ids)

    def fitted(self, text: str, other: str | None, length: int) -> Fitted:
        found = self._tokenizer.encode(text, other, add_special_tokens=True)
        truncated = len(found.ids) > length
        if truncated:
            marks = self._tokenizer.num_special_tokens_to_add(other is not None)
            check_room(length - marks, length, marks)
            self._tokenizer.enable_truncation(length, strategy="longest_first")
            found = self._tokenizer.encode(text, other, add_special_tokens=True)
            self._tokenizer.no_truncation()
        return Fitted(list(found.ids), list(found.type_ids), truncated)

    @property
    def end(self) -> int:
        for name in (_configured_end(self._folder), *_KNOWN_ENDS):
            found = self._tokenizer.token_to_id(name) if name else None
            if found is not None:
                return int(found)
        raise ValueError(
            f"data.tokenizer = {str(self._folder)!r}: no end-of-sequence token; name one as "
            "eos_token in the folder's tokenizer_config.json"
        )


def check_room(room: int, length: int, marks: int) -> None:
    """Check that there is room for text beside special tokens.

    Raises:
        ValueError: there is none.
    """
    if room < 1:
        raise ValueError(
            f"data.sequence_length = {length}: no room for text beside {marks} special tokens; "
            f"use at least {marks + 1}"
        )


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a `data.tokenizer`.

    Raises:
        ValueError: there is no such folder, or no tokenizer in it.
        ImportError: the optional package is not installed.
    """
    return Bytes() if name == BYTES else FolderTokenizer(Path(name).expanduser())


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds one that `load_tokenizer` can read."""
    names = {file.name for file in folder.iterdir()}
    return "tokenizer.json" in names or {"vocab.json", "merges.txt"} <= names


def _read(folder: Path) -> Any:
    where = f"data.tokenizer = {str(folder)!r}"
    if not folder.is_dir():
        raise ValueError(
            f"{where}: no such folder, seen from {Path.cwd()}; name one with tokenizer.json, or "
            f'use "{BYTES}"'
        )
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ImportError(f'{where}: {explain(error)}, or use tokenizer = "{BYTES}"') from error
    whole, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    if not has_tokenizer(folder):
        raise ValueError(
            f"{where}: holds neither tokenizer.json nor vocab.json with merges.txt; "
            "save the tokenizer there in one of these forms"
        )
    try:
        if whole.is_file():
            return tokenizers.Tokenizer.from_file(str(whole))
        model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
        found = tokenizers.Tokenizer(model)
        found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.add_special_tokens([end for end in _KNOWN_ENDS if found.token_to_id(end) is not None])
    except Exception as error:  # the package raises bare exceptions
        raise ValueError(f"{where}: cannot be read: {error}; save the tokenizer again") from error
    return found


def _configured_end(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        end = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file}: not a JSON object ({error}); correct or remove it") from None
    found = end.get("content") if isinstance(end, dict) else end
    return None if found is None else str(found)
