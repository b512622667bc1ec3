"""Text to token ids: bytes, or a tokenizer read from a folder."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from thinpipe.launch.data.tokenizer_files import read_backend, read_ends, without_dummy_space
from thinpipe.pipeline.models.paths import user_path

BYTES = "bytes"
Spans = list[tuple[int, int]]
"""Where the text of each token begins and ends, in characters."""


class Fitted(NamedTuple):
    """Texts that fit into a sequence: tokens, their types (0, or 1 in a second text)."""

    ids: list[int]
    types: list[int]
    truncated: bool


class FolderTokenizer:
    """A folder's tokenizer, computed by the package tokenizers (`backend`).

    Ids are below `vocab`, and `holes` are those that stand for nothing; `unit` is what one token is
    called. `begin` is what the tokenizer itself puts before a text, such as a BOS token. `ends` all
    end an answer that is being written. `marks` are tokens that no other text becomes a part of.
    """

    unit = "tokens"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = read_backend(folder)
        known = set(self.backend.get_vocab(with_added_tokens=True).values())
        if not known:
            raise ValueError(f"data.tokenizer = {str(folder)!r}: has no tokens; save it again")
        self.vocab: int = max(known) + 1
        self.holes = tuple(number for number in range(self.vocab) if number not in known)
        self.ends = read_ends(folder, self.backend)
        self.begin = self._begin()
        self.marks: frozenset[int] = frozenset(self.backend.get_added_tokens_decoder())

    def _begin(self) -> tuple[int, ...]:
        alone, given = self.encode("a"), list(self.backend.encode("a").ids)
        places = range(len(given) - len(alone) + 1)
        first = next((at for at in places if given[at : at + len(alone)] == alone), 0)
        return tuple(given[:first])

    @cached_property
    def _following(self) -> Any:
        return without_dummy_space(self.backend)

    @cached_property
    def key(self) -> str:
        """A digest of all that decides which tokens a text has."""
        return hashlib.sha256(str(self.backend.to_str()).encode()).hexdigest()

    def encode(self, text: str, *, after: bool = False) -> list[int]:
        """A text, without special tokens around it.

        `after` another text, a tokenizer's dummy space is not put before it.
        """
        return list(self._encoded(text, after=after).ids)

    def begun(self, ids: list[int]) -> list[int]:
        """Ids of a text behind `begin`, which may stand there already."""
        begin = list(self.begin)
        return ids if ids[: len(begin)] == begin else begin + ids

    def spans(self, text: str, *, after: bool = False) -> tuple[list[int], Spans]:
        """As `encode`, with the place of every token."""
        found = self._encoded(text, after=after)
        return list(found.ids), list(found.offsets)

    def _encoded(self, text: str, *, after: bool) -> Any:
        backend = self._following if after else self.backend
        return backend.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """The text of ids, with special tokens if asked; half a character is U+FFFD."""
        return str(self.backend.decode(ids, skip_special_tokens=not special))

    def fitted(self, text: str, other: str | None, length: int) -> Fitted:
        """One or two texts to classify, with special tokens, in at most `length` tokens.

        Of two texts the longer one is truncated first.
        """
        found = self.backend.encode(text, other, add_special_tokens=True)
        truncated = len(found.ids) > length
        if truncated:
            marks = self.backend.num_special_tokens_to_add(other is not None)
            _check_room(length - marks, length, marks)
            self.backend.enable_truncation(length, strategy="longest_first")
            found = self.backend.encode(text, other, add_special_tokens=True)
            self.backend.no_truncation()
        return Fitted(list(found.ids), list(found.type_ids), truncated)

    @property
    def end(self) -> int:
        """The id that is written to end an example."""
        if not self.ends:
            raise ValueError(
                f"data.tokenizer = {str(self.folder)!r}: no end-of-sequence token; name one as "
                "eos_token in the folder's tokenizer_config.json"
            )
        return self.ends[0]


class Bytes:
    """As FolderTokenizer; every byte is a token, and byte 0, which text does not hold, a mark."""

    vocab = 256
    unit = key = BYTES
    backend = None
    holes: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    end = 0
    ends: tuple[int, ...] = (end,)
    marks: frozenset[int] = frozenset(ends)

    def encode(self, text: str, *, after: bool = False) -> list[int]:
        return list(text.encode())

    def begun(self, ids: list[int]) -> list[int]:
        return ids

    def spans(self, text: str, *, after: bool = False) -> tuple[list[int], Spans]:
        """Every byte of a character has the place of the character."""
        places = [(place, place + 1) for place, char in enumerate(text) for _ in char.encode()]
        return self.encode(text), places

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        return bytes(ids).decode(errors="replace")

    def fitted(self, text: str, other: str | None, length: int) -> Fitted:
        first, second = self.encode(text), [] if other is None else self.encode(other)
        marks = [] if other is None else [self.end]
        room = length - len(marks)
        _check_room(room, length, len(marks))
        over = len(first) + len(second) - room
        if over > 0 and marks:
            longer = max(len(first), len(second))
            shorter = min(min(len(first), len(second)), room // 2)
            kept = min(longer, room - shorter)
            one = kept if len(first) > len(second) else shorter
            first, second = first[:one], second[: room - one]
        ids = [*first[:room], *marks, *second]
        return Fitted(ids, [0] * len(ids), over > 0)


Tokenizer = Bytes | FolderTokenizer


def _check_room(room: int, length: int, marks: int) -> None:
    if room < 1:
        raise ValueError(
            f"data.sequence_length = {length}: no room for text with {marks} special tokens; "
            f"use at least {marks + 1}"
        )


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a `data.tokenizer`."""
    return Bytes() if name == BYTES else FolderTokenizer(user_path(name))
