"""Documents of rows as a token file: each row is encoded once on a host, in bounded memory."""

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.documents import Encoder, Rejected
from thinpipe.launch.data.reading.source import Source
from thinpipe.launch.data.rows import Rows
from thinpipe.launch.data.token_file import TokenFile, TokenWriter, rejections, token_type
from thinpipe.launch.data.tokens.progress import Progress
from thinpipe.launch.data.tokens.store import check_room, key_of, obtain

_VERSION = 2  # of how rows become tokens: another one makes all files again
_FIRST = 64  # rows whose tokens say how many there will be


def encoded_rows(source: Source, fields: Sequence[Field], encoder: Encoder) -> TokenFile:
    """The documents of a source's rows, made now if no process did before.

    Raises:
        ValueError: no row can be used; names the reasons and the first rows.
        OSError: there is no room for the tokens, or they cannot be written.
    """
    key = key_of(_VERSION, source.key, [str(field) for field in fields], encoder.key)
    what = source.what

    def make(folder: Path) -> None:
        _make(source.rows(fields), encoder, folder, what)

    found = obtain(key, TokenFile.open, make, what=what)
    if not len(found):
        raise ValueError(f"{what}: no row can be used: {'; '.join(rejections(found))}; correct it")
    return found


def _make(rows: Rows, encoder: Encoder, folder: Path, what: str) -> None:
    count = rows.count()
    _estimate(rows, count, encoder, folder, what)
    with closing(TokenWriter(folder, ids=encoder.ids, columns=encoder.columns)) as writer:
        done = int(writer.done or 0)
        progress = Progress(f"{what}: encoding rows", count, done, unit="rows")
        for number, row in enumerate(islice(rows, done, None), start=done):
            found = encoder.encode(row)
            if isinstance(found, Rejected):
                writer.reject(found)
            else:
                writer.add(found, number)
            progress.at(number + 1)
            writer.passed(number + 1)
        writer.finish({})
    progress.finished(folder)


def _estimate(rows: Rows, count: int, encoder: Encoder, folder: Path, what: str) -> None:
    first = [encoder.encode(row) for row in islice(rows, _FIRST)]
    tokens = sum(len(one) for one in first if not isinstance(one, Rejected))
    width = token_type(encoder.ids).itemsize + len(encoder.columns)
    check_room(folder, tokens * count // len(first) * width, what)
