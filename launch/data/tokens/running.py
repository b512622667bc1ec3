"""Running text as one stream of tokens on disk, made in bounded memory."""

import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.documents import Document
from thinpipe.launch.data.reading.source import Source
from thinpipe.launch.data.reading.text import Chooser, Decoder, Extent, Part
from thinpipe.launch.data.token_file import TokenFile, TokenWriter, token_type
from thinpipe.launch.data.tokenizer import Tokenizer
from thinpipe.launch.data.tokens.pieces import CONTEXT, Cutter, Piece
from thinpipe.launch.data.tokens.progress import Progress
from thinpipe.launch.data.tokens.store import check_room, key_of, obtain

_VERSION = 1
"""Of how text becomes tokens: another one makes all files again."""
_PIECES = 48
"""Tokenized at a time, 1.5 MB: some hundred bytes of memory for each."""
_FLUSH_S = 5.0
"""Between what an interrupted process need not do again; flushing waits for the disk."""

_Ids = npt.NDArray[np.int32]


def running_tokens(
    source: Source, part: Part, field: Field, tokenizer: Tokenizer, *, limit: int | None
) -> TokenFile:
    """The tokens of a part of a source's running text, made now if no process did before.

    `field` is the one of its rows; `limit` is how many bytes of the text are read. The part "all"
    is not divided.

    Raises:
        ValueError: the text cannot be read, or is not UTF-8, which the tokenizer needs.
        OSError: there is no room for the tokens, or they cannot be written.
    """
    named = "" if source.is_text else field
    key = key_of(_VERSION, source.key, part, named, limit, tokenizer.key)

    def make(folder: Path) -> None:
        _Maker(source, part, field, tokenizer, limit).make(folder)

    return obtain("tokens", key, TokenFile.open, make, what=source.what)


class _Maker:
    def __init__(
        self, source: Source, part: Part, field: Field, tokenizer: Tokenizer, limit: int | None
    ) -> None:
        self._source, self._part, self._tokenizer = source, part, tokenizer
        self._texts = source.texts(field)
        self._extent = Extent.of(self._texts, limit, one_document=source.is_one_document)
        self._nbytes = self._extent.nbytes(part)
        self._utf8, self._forced = True, 0

    def make(self, folder: Path) -> None:
        """Write the folder, from where an interrupted process left off."""
        writer = TokenWriter(folder, ids=self._tokenizer.vocab, counted=False)
        done, context, self._utf8, self._forced = writer.done or (0, "", True, 0)
        writer.rejected.clear()  # those before are met again on the way
        progress = Progress(f"{self._source.what}: tokenizing", self._nbytes, done)
        flushed = time.monotonic()
        try:
            for tokens, nbytes, end in self._tokens(folder, writer, done, context):
                writer.extend(Document(tokens))
                done += nbytes
                progress.at(done)
                if time.monotonic() - flushed > _FLUSH_S:
                    writer.flush([done, end, self._utf8, self._forced])
                    flushed = time.monotonic()
            writer.add(Document(np.zeros(0, dtype=np.int32)), 0)  # its end
            writer.finish({"utf8": self._utf8, "forced": self._forced, "bytes": self._nbytes})
        finally:
            writer.close()
        progress.finished(folder)

    def _tokens(
        self, folder: Path, writer: TokenWriter, done: int, context: str
    ) -> Iterator[tuple[_Ids, int, str]]:
        """Tokens, the bytes that they stand for, and the text that the next ones follow."""
        parts = self._texts.read(Chooser(self._extent, self._part), writer.reject)
        parts = _without(parts, done)
        if self._tokenizer.backend is None:
            check_room(folder, self._nbytes, self._source.what)
            yield from self._plain(parts)
            return
        cutter, decoder, first = Cutter(self._tokenizer.backend), Decoder(), True
        pieces = cutter.pieces(self._decoded(parts, decoder), context)
        while batch := list(itertools.islice(pieces, _PIECES)):
            found = cutter.encode(batch)
            nbytes = sum(len(piece.text.encode()) for piece in batch)
            if first:
                self._estimate(folder, sum(map(len, found)), nbytes)
                nbytes, first = nbytes + decoder.skipped, False
            self._forced += sum(piece.forced for piece in batch)
            yield np.concatenate(found), nbytes, _end(batch[-1])

    def _estimate(self, folder: Path, tokens: int, nbytes: int) -> None:
        """Check the disk before anything is written, by the first tokens of the text."""
        share = tokens * token_type(self._tokenizer.vocab).itemsize / max(1, nbytes)
        check_room(folder, int(share * self._nbytes), self._source.what)

    def _plain(self, parts: Iterable[bytes]) -> Iterator[tuple[_Ids, int, str]]:
        decoder = Decoder()
        for part in parts:
            if self._utf8:
                try:
                    decoder.decode(part)
                except UnicodeDecodeError:
                    self._utf8 = False
            yield np.frombuffer(part, dtype=np.uint8).astype(np.int32), len(part), ""

    def _decoded(self, parts: Iterable[bytes], decoder: Decoder) -> Iterator[str]:
        try:
            for part in parts:
                yield decoder.decode(part)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._source.what}: the text is not UTF-8 ({error}), as data.tokenizer needs; "
                'convert it, or use tokenizer = "bytes"'
            ) from None


def _end(piece: Piece) -> str:
    return (piece.context + piece.text)[-CONTEXT:]


def _without(parts: Iterator[bytes], skipped: int) -> Iterator[bytes]:
    """The text from a byte on."""
    for part in parts:
        if skipped < len(part):
            yield part[skipped:]
        skipped = max(0, skipped - len(part))
