"""Documents of rows as a token file: each row is encoded once on a host, in bounded memory."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.documents import Encoder, Rejected
from thinpipe.launch.data.reading.source import Source
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
    key = key_of(_VERSION, source.key, [*map(str, fields)], encoder.key)
    make = partial(_make, source, fields, encoder)
    found = obtain(key, TokenFile.open, make, what=source.what)
    if not len(found):
        reasons = "; ".join(rejections(found))
        raise ValueError(f"{source.what}: no row can be used: {reasons}; correct it")
    return found


def _make(source: Source, fields: Sequence[Field], encoder: Encoder, folder: Path) -> None:
    rows = source.rows(fields)
    count = rows.count()
    first = [encoder.encode(row) for row in islice(rows, _FIRST)]
    tokens = sum(len(one) for one in first if not isinstance(one, Rejected))
    width = token_type(encoder.ids).itemsize + len(encoder.columns)
    check_room(folder, tokens * count // len(first) * width, source.what)
    with closing(TokenWriter(folder, ids=encoder.ids, columns=encoder.columns)) as writer:
        done = int(writer.done or 0)
        progress = Progress(f"{source.what}: encoding rows", count, done, unit="rows")
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
