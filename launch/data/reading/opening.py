"""Files opened as what they hold: gzip and zstd are unpacked on the way."""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from thinpipe.launch.host.cache import cache_folder

Compression = Literal["gzip", "zstd"] | None
COMPRESSED = (".gz", ".gzip", ".zst", ".zstd")
_MAGIC: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_HEAD_NBYTES = 1 << 16  # what a file's kind is told by
_BLOCK_NBYTES = 1 << 20  # in RAM at a time, however large the file


def compression_of(file: Path) -> Compression:
    """How a file is packed, by its first bytes.

    Raises:
        ValueError: its name says that it is packed, and it is not.
    """
    with file.open("rb") as opened:
        head = opened.read(4)
    found = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
    if found is None and head and file.suffix.lower() in COMPRESSED:
        raise ValueError(
            f"{file}: does not begin as {file.suffix} does; rename it, or download it again"
        )
    return found


@contextmanager
def opened(file: Path, packed: Compression) -> Iterator[io.BufferedReader]:
    """The content of a file, to be read from its beginning.

    Raises:
        ValueError: it is damaged, or ends too early.
    """
    if packed is None:
        with file.open("rb") as raw:
            yield raw
        return
    import pyarrow as pa  # whose readers, unlike others, notice that a stream is cut

    try:
        with pa.CompressedInputStream(pa.OSFile(str(file)), packed) as stream:
            yield io.BufferedReader(stream, _BLOCK_NBYTES)
    except OSError as error:
        if error.errno is not None:  # of the disk
            raise
        problem = str(error).rstrip(".")
        raise ValueError(
            f"{file}: its compressed data is damaged ({problem}); download it again"
        ) from error


def head_of(file: Path, packed: Compression) -> bytes:
    """The first 64 KiB of a file's content."""
    with opened(file, packed) as stream:
        return stream.read(_HEAD_NBYTES)


def blocks(file: Path, packed: Compression, start: int = 0) -> Iterator[bytes]:
    """The content of a file from a byte on, in blocks of a megabyte."""
    with opened(file, packed) as stream:
        if packed is None:
            stream.seek(start)
        else:
            while start:
                skipped = len(stream.read(min(start, _BLOCK_NBYTES)))
                if not skipped:
                    return
                start -= skipped
        while block := stream.read(_BLOCK_NBYTES):
            yield block


@contextmanager
def seekable(file: Path, packed: Compression) -> Iterator[IO[bytes]]:
    """A file that is not read from beginning to end; a packed one is unpacked on disk meanwhile."""
    if packed is None:
        with file.open("rb") as raw:
            yield raw
        return
    with tempfile.TemporaryFile(dir=cache_folder()) as unpacked:
        for block in blocks(file, packed):
            unpacked.write(block)
        unpacked.seek(0)
        yield unpacked
