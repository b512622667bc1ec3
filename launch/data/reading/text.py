"""Running text: documents of files or rows, one after the other, and which part is held out."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.documents import Rejected
from thinpipe.launch.data.reading.kinds import Form
from thinpipe.launch.data.reading.opening import blocks
from thinpipe.launch.data.rows import RowError, Rows

HELD_OUT = 10
"""One in this many documents, or the last of this many equal parts of the text."""
Part = Literal["all", "training", "held out"]


class FileTexts:
    """A document for each file; they are joined to one text, read in order, in bounded memory."""

    def __init__(self, forms: Sequence[Form]) -> None:
        self._forms = forms
        self._unpacked: dict[int, int] = {}

    def sizes(self) -> Iterator[int]:
        """Bytes of each document; those that follow some limit are not asked for."""
        return map(self._size, range(len(self._forms)))

    def read(self, choose: "Chooser", reject: Callable[[Rejected], None]) -> Iterator[bytes | None]:
        """The chosen bytes of each document and None at its end; of rows that cannot be used, why.

        A document of which nothing is chosen may have an end.
        """
        for number, form in enumerate(self._forms):
            if choose.over:
                return
            start, stop = choose(number, self._size(number))
            for block in blocks(form.path, form.compression, start) if stop > start else ():
                yield block[: stop - start]
                start += len(block)
                if start >= stop:
                    break
            yield None

    def _size(self, number: int) -> int:
        form = self._forms[number]
        if form.compression is None:
            return form.path.stat().st_size
        if number not in self._unpacked:
            self._unpacked[number] = sum(map(len, blocks(form.path, form.compression)))
        return self._unpacked[number]


class RowTexts:
    """As FileTexts, with a document for each row; with `lines` each ends in a line feed."""

    def __init__(self, rows: Rows, field: Field, *, lines: bool) -> None:
        self._rows, self._field, self._lines = rows, field, lines

    def sizes(self) -> Iterator[int]:
        return (0 if isinstance(found, Rejected) else len(found) for found in self._documents())

    def read(self, choose: "Chooser", reject: Callable[[Rejected], None]) -> Iterator[bytes | None]:
        for number, found in enumerate(self._documents()):
            if choose.over:
                return
            if isinstance(found, Rejected):
                choose(number, 0)
                reject(found)
                continue
            start, stop = choose(number, len(found))
            yield found[start:stop]
            yield None

    def _documents(self) -> Iterator[bytes | Rejected]:
        for row in self._rows:
            try:
                text = row.text(self._field, blank=True)
            except RowError as error:
                yield Rejected(row.where, str(error))
            else:
                whole = text.endswith("\n") or not self._lines
                yield (text if whole else text + "\n").encode()


Texts = FileTexts | RowTexts


@dataclass(frozen=True)
class Extent:
    """How much text there is, within a limit: all of it, and every tenth document of it."""

    total: int
    tenth: int
    limit: int | None

    @classmethod
    def of(cls, texts: Texts, limit: int | None, *, one_document: bool) -> "Extent":
        """Measure it, in bytes; of one document, the end is held out."""
        total = tenth = 0
        for number, size in enumerate(texts.sizes()):
            taken = size if limit is None else min(size, limit - total)
            total += taken
            tenth += 0 if one_document or number % HELD_OUT != HELD_OUT - 1 else taken
            if total == limit:
                break
        return cls(total, tenth, limit)

    @cached_property
    def by_document(self) -> bool:
        """Whether every tenth document is held out: these are near a tenth of the bytes.

        Otherwise it is the last tenth of the joined text.
        """
        return self.total / (2 * HELD_OUT) <= self.tenth <= 2 * self.total / HELD_OUT

    def nbytes(self, part: Part) -> int:
        held_out = self.tenth if self.by_document else self.total // HELD_OUT
        return {"all": self.total, "held out": held_out, "training": self.total - held_out}[part]


class Chooser:
    """Which bytes of each document are of a part; called for all documents in order."""

    def __init__(self, extent: Extent, part: Part) -> None:
        self._extent, self._part, self._place = extent, part, 0

    @property
    def over(self) -> bool:
        return self._extent.limit is not None and self._place >= self._extent.limit

    def __call__(self, number: int, size: int) -> tuple[int, int]:
        """Where the chosen part of a document begins and ends."""
        limit, first = self._extent.limit, self._place
        size = size if limit is None else min(size, limit - first)
        self._place += size
        if self._part == "all":
            return 0, size
        if self._extent.by_document:
            held_out = number % HELD_OUT == HELD_OUT - 1
            return 0, size if held_out == (self._part == "held out") else 0
        end = self._extent.total - self._extent.nbytes("held out")
        cut = min(max(end - first, 0), size)
        return (cut, size) if self._part == "held out" else (0, cut)


class Decoder:
    """UTF-8 in parts; a character that is cut at either end of the text is left out."""

    def __init__(self) -> None:
        self._decoder, self._begun = codecs.getincrementaldecoder("utf-8")(), False
        self.skipped = 0
        """Bytes left out at the beginning."""

    def decode(self, part: bytes) -> str:
        """The next part.

        Raises:
            UnicodeDecodeError: it is not UTF-8.
        """
        if not self._begun and part:
            self._begun = True
            # where the first whole character begins
            self.skipped = next((i for i, byte in enumerate(part[:4]) if byte & 0xC0 != 0x80), 0)
            part = part[self.skipped :]
        return self._decoder.decode(part)
