"""Running text as one stream of tokens on disk, made in bounded memory."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.documents import Document
from thinpipe.launch.data.reading.source import Source
from thinpipe.launch.data.reading.text import Chooser, Decoder, Extent, Part, Texts
from thinpipe.launch.data.token_file import TokenFile, TokenWriter, token_type
from thinpipe.launch.data.tokenizer import Tokenizer
from thinpipe.launch.data.tokens.pieces import CONTEXT, Cutter, Piece
from thinpipe.launch.data.tokens.progress import Progress
from thinpipe.launch.data.tokens.store import check_room, key_of, obtain

_VERSION = 3  # of how text becomes tokens: another one makes all files again
_BATCH_SIZE, _MOST_PIECES = 1 << 20, 4096
"""Characters, or pieces, tokenized at a time: some hundred bytes of memory for each character."""

_Ids = npt.NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True)
class Marks:
    """Tokens before and after every document."""

    begin: tuple[int, ...] = ()
    finish: tuple[int, ...] = ()

    def put(self, tokens: _Ids, *, first: bool, last: bool) -> _Ids:
        parts = [tokens]
        if first and self.begin and tuple(tokens[: len(self.begin)]) != self.begin:
            parts.insert(0, np.array(self.begin, dtype=np.int32))
        if last and self.finish and tuple(tokens[-len(self.finish) :]) != self.finish:
            parts.append(np.array(self.finish, dtype=np.int32))
        return np.concatenate(parts)


def running_tokens(
    source: Source,
    part: Part,
    field: Field,
    tokenizer: Tokenizer,
    *,
    limit: int | None,
    marks: Marks | None,
) -> TokenFile:
    """The tokens of a part of a source's running text, made now if no process did before.

    `field` is the one of its rows; `limit` is how many bytes of the text are read. The part "all"
    is not divided. Without `marks` it is one document, in which a row is a line.

    Raises:
        ValueError: the text cannot be read, or is not UTF-8, which the tokenizer needs.
        OSError: there is no room for the tokens, or they cannot be written.
    """
    named = "" if source.is_text else field
    apart = None if marks is None else [marks.begin, marks.finish]
    key = key_of(_VERSION, source.key, part, named, limit, tokenizer.key, apart)

    def make(folder: Path) -> None:
        texts = source.texts(field, lines=marks is None)
        extent = Extent.of(texts, limit, one_document=source.is_one_document)
        _Maker(source.what, texts, extent, part, tokenizer, marks).make(folder)

    return obtain(key, TokenFile.open, make, what=source.what)


@dataclass(frozen=True)
class _Step:
    """Tokens, each with whether a document ends there, and what is known after them."""

    parts: list[tuple[_Ids, bool]]
    nbytes: int
    """Of the text that they stand for."""
    context: str = ""
    """The text that the next ones follow in a document that goes on."""


@dataclass(frozen=True)
class _Text:
    """A piece of text; whether a document begins and ends with it."""

    piece: Piece
    first: bool
    last: bool
    nbytes: int


@dataclass
class _Maker:
    what: str
    texts: Texts
    extent: Extent
    part: Part
    tokenizer: Tokenizer
    marks: Marks | None
    utf8: bool = True
    forced: int = 0
    """Places where text was cut although the tokenizer does not split it there."""

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes(self.part)

    def make(self, folder: Path) -> None:
        with closing(TokenWriter(folder, ids=self.tokenizer.vocab)) as writer:
            done, context, self.utf8, self.forced = writer.done or (0, "", True, 0)
            writer.rejected.clear()  # those before are met again on the way
            progress = Progress(f"{self.what}: tokenizing", self.nbytes, done)
            for step in self._steps(folder, writer, done, context):
                for tokens, ends in step.parts:
                    writer.add(Document(tokens), 0) if ends else writer.extend(Document(tokens))
                done += step.nbytes
                progress.at(done)
                writer.passed([done, step.context, self.utf8, self.forced])
            if self.marks is None:
                writer.add(Document(np.zeros(0, dtype=np.int32)), 0)  # its end
            writer.finish({"utf8": self.utf8, "forced": self.forced, "bytes": self.nbytes})
        progress.finished(folder)

    def _steps(self, folder: Path, writer: TokenWriter, done: int, context: str) -> Iterator[_Step]:
        read = self.texts.read(Chooser(self.extent, self.part), writer.reject)
        documents = _documents(_without(read, done), joined=self.marks is None)
        if self.tokenizer.backend is None:
            check_room(folder, self.nbytes, self.what)
            yield from self._plain(documents, begun=done > 0 and bool(context))
            return
        cutter, first = Cutter(self.tokenizer.backend), True
        for batch in _batches(self._pieces(cutter, documents, context)):
            found = cutter.encode([text.piece for text in batch])
            nbytes = sum(text.nbytes for text in batch)
            self.forced += sum(text.piece.forced for text in batch)
            if first:  # the disk is checked before anything is written
                each = token_type(self.tokenizer.vocab).itemsize / max(1, nbytes)
                check_room(folder, int(sum(map(len, found)) * each * self.nbytes), self.what)
                first = False
            parts = [
                (self._marked(tokens, first=text.first, last=text.last), self._ends(text.last))
                for tokens, text in zip(found, batch, strict=True)
            ]
            last = batch[-1].piece
            ends = self._ends(batch[-1].last)
            yield _Step(parts, nbytes, "" if ends else (last.context + last.text)[-CONTEXT:])

    def _marked(self, tokens: _Ids, *, first: bool, last: bool) -> _Ids:
        return tokens if self.marks is None else self.marks.put(tokens, first=first, last=last)

    def _ends(self, last: bool) -> bool:
        return last and self.marks is not None

    def _pieces(
        self, cutter: Cutter, documents: Iterable[Iterator[bytes]], context: str
    ) -> Iterator[_Text]:
        """The pieces of every document; `context` is what stands before them in the first."""
        for parts in documents:
            decoder, first, first_here = Decoder(), not context, True
            for piece, last in _with_last(cutter.pieces(self._decoded(parts, decoder), context)):
                skipped = decoder.skipped if first_here else 0
                yield _Text(piece, first, last, len(piece.text.encode()) + skipped)
                first = first_here = False
            context = ""

    def _plain(self, documents: Iterable[Iterator[bytes]], *, begun: bool) -> Iterator[_Step]:
        decoder = Decoder()
        for parts in documents:
            first, begun = not begun, False
            for part, last in _with_last(parts):
                try:
                    if self.utf8:
                        decoder.decode(part)
                except UnicodeDecodeError:
                    self.utf8 = False
                tokens = np.frombuffer(part, dtype=np.uint8).astype(np.int32)
                marked, ends = self._marked(tokens, first=first, last=last), self._ends(last)
                yield _Step([(marked, ends)], len(part), "" if ends else "within")
                first = False

    def _decoded(self, parts: Iterable[bytes], decoder: Decoder) -> Iterator[str]:
        try:
            for part in parts:
                yield decoder.decode(part)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.what}: the text is not UTF-8 ({error}), as data.tokenizer needs; "
                'convert it, or use tokenizer = "bytes"'
            ) from None


def _with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    for item, following in pairwise(chain(items, (None,))):
        assert item is not None, "that is what follows the last one"
        yield item, following is None


def _batches(texts: Iterable[_Text]) -> Iterator[list[_Text]]:
    """Texts to tokenize together, so many that threads have work and memory is bounded."""
    batch: list[_Text] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text.piece.text)
        if size >= _BATCH_SIZE or len(batch) >= _MOST_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _documents(parts: Iterator[bytes | None], *, joined: bool) -> Iterator[Iterator[bytes]]:
    if joined:
        yield (part for part in parts if part)
        return
    for part in parts:
        if part:  # else nothing is chosen of it
            yield chain([part], iter(parts.__next__, None))


def _without(parts: Iterator[bytes | None], skipped: int) -> Iterator[bytes | None]:
    """The text from a byte on; of documents that are left out nothing stays but their ends."""
    for part in parts:
        if part is None:
            yield None
            continue
        if skipped < len(part):
            yield part[skipped:]
        skipped = max(0, skipped - len(part))
