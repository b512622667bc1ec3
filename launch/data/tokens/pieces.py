"""Running text in pieces that a tokenizer gives the same tokens as the whole.

A piece ends where the tokenizer splits text anyway, whatever stands further off: where its own
pre-tokenizer does, or between two characters that no token of its vocabulary has side by side. The
text before a piece is tokenized with it as its context and its tokens are dropped, so that a
tokenizer that puts something before a text, as Metaspace does, does so once.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

_SIZE = 32_768  # characters of a piece: tokenizers are fastest on pieces that stay in a cache
CONTEXT = 128
"""Characters on either side of a cut that decide whether text is split there."""
_TRIES = 12  # places of a kind that are tried for a cut
_LONGEST = 64
"""Pieces' worth of text without a place for a cut; then it is cut all the same, which is said."""
_SOUGHT = 4096  # characters in which a place is sought
_PLACES = tuple(map(re.compile, (r"\n(?=\S)", r"\S(?=\s\S)", r"[^\w\s](?=\w)")))
"""What ends a piece, the best first."""


@dataclass(frozen=True)
class Piece:
    """Text to tokenize, behind `context` that gives `skipped` tokens; `forced` if it is cut
    where the tokenizer does not split.
    """

    context: str
    text: str
    skipped: int
    forced: bool = False


class Cutter:
    """Cuts text for one tokenizer of the package tokenizers."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def pieces(self, parts: Iterable[str], context: str = "") -> Iterator[Piece]:
        """Pieces of a text that comes in parts; `context` is what stands before it."""
        left, forced = "", False
        for part in parts:
            left += part
            start = 0
            while len(left) - start > 2 * _SIZE:
                cut = self._cut(context, left, start)
                if cut is None:
                    break
                place, forced_next = cut
                yield self._piece(context, left[start:place], forced)
                context = left[max(0, place - CONTEXT) : place]
                start, forced = place, forced_next
            left = left[start:]
        if left:
            yield self._piece(context, left, forced)

    def encode(self, pieces: Sequence[Piece]) -> list[npt.NDArray[np.int32]]:
        found = self._backend.encode_batch_fast(
            [piece.context + piece.text for piece in pieces], add_special_tokens=False
        )
        return [
            np.array(each.ids[piece.skipped :], dtype=np.int32)
            for each, piece in zip(found, pieces, strict=True)
        ]

    def _piece(self, context: str, text: str, forced: bool) -> Piece:
        context = "" if forced else context  # as if the text began here
        return Piece(context, text, len(self._ids(context)) if context else 0, forced)

    def _cut(self, context: str, text: str, start: int) -> tuple[int, bool] | None:
        """Where the next piece ends, and whether that is forced; None: more text is needed."""
        first = start + _SIZE // 2
        while first + _SIZE <= len(text) - CONTEXT:
            for place in _candidates(text, first, first + _SIZE):
                before = (context + text[start:place])[-CONTEXT:]
                if self._splits(before, text[place : place + CONTEXT]):
                    return place, False
            first += _SIZE
        return (first, True) if first - start > _LONGEST * _SIZE else None

    def _splits(self, before: str, after: str) -> bool:
        """Whether the tokens before a place never depend on what follows, nor the other way."""
        if not self._is_split(before, after):
            return False
        shorter = before[-CONTEXT // 4 :]
        joined, near = self._ids(before + after), self._ids(shorter + after)
        left, left_near = self._ids(before), self._ids(shorter)
        return (
            joined[: len(left)] == left
            and near[: len(left_near)] == left_near
            and joined[len(left) :] == near[len(left_near) :]
        )

    def _is_split(self, before: str, after: str) -> bool:
        left, joined = self._words(before), self._words(before + after)
        if joined[: len(left)] == left:
            return True
        whole, part = "".join(joined), "".join(left)
        if not whole.startswith(part) or len(whole) == len(part):
            return False
        pair = part[-1:] + whole[len(part)]
        return pair not in self._pairs and whole[len(part)] in self._characters

    def _words(self, text: str) -> list[str]:
        normalizer, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        text = text if normalizer is None else normalizer.normalize_str(text)
        return [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _pairs(self) -> set[str]:
        """Characters that some token has side by side."""
        vocab = self._backend.get_vocab()
        return {token[at : at + 2] for token in vocab for at in range(len(token) - 1)}

    @cached_property
    def _characters(self) -> set[str]:
        """Characters that are tokens: unknown ones may be joined."""
        return {token for token in self._backend.get_vocab() if len(token) == 1}


def _candidates(text: str, start: int, stop: int) -> Iterator[int]:
    """Places for a cut near `stop`, the best kinds first, the last of each first."""
    start = max(start, stop - _SOUGHT)
    for kind in _PLACES:
        ends = [found.end() for found in kind.finditer(text, start, stop)]
        yield from reversed(ends[-_TRIES:])
    yield from range(stop, stop - _TRIES, -1)
