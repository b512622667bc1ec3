"""Documents of rows as a token file: each row is encoded once on a host, in bounded memory."""

import time
from collections.abc import Sequence
from pathlib import Path

from thinpipe.launch.data.columns import Field
from thinpipe.launch.data.documents import Encoder, Rejected
from thinpipe.launch.data.reading.source import Source
from thinpipe.launch.data.rows import Rows
from thinpipe.launch.data.token_file import TokenFile, TokenWriter, rejections, token_type
from thinpipe.launch.data.tokens.progress import Progress
from thinpipe.launch.data.tokens.store import check_room, key_of, obtain

_VERSION = 1
_BATCH = 64
_FLUSH_S = 5.0


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

    found = obtain("tokens", key, TokenFile.open, make, what=what)
    if not len(found):
        raise ValueError(f"{what}: no row can be used: {'; '.join(rejections(found))}; correct it")
    return found


def _make(rows: Rows, encoder: Encoder, folder: Path, what: str) -> None:
    """Write the folder, from where an interrupted process left off."""
    writer = TokenWriter(folder, ids=encoder.ids, columns=encoder.columns)
    done = int(writer.done or 0)
    progress = Progress(f"{what}: encoding rows", len(rows), done, unit="rows")
    flushed, tokens = time.monotonic(), 0
    try:
        for batch in rows.batches(_BATCH, done):
            found = encoder.encode(batch)
            if not tokens:  # check the disk before anything is written, by the first rows
                tokens = sum(len(one) for one in found if not isinstance(one, Rejected))
                width = token_type(encoder.ids).itemsize + len(encoder.columns)
                check_room(folder, tokens * len(rows) // len(batch) * width, what)
            for row, one in enumerate(found, start=done):
                if isinstance(one, Rejected):
                    writer.reject(one)
                else:
                    writer.add(one, row)
            done += len(batch)
            progress.at(done)
            if time.monotonic() - flushed > _FLUSH_S:
                writer.flush(done)
                flushed = time.monotonic()
        writer.finish({})
    finally:
        writer.close()
    progress.finished(folder)
