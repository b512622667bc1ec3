"""Files opened as what they hold: gzip and zstd are unpacked on the way."""

import gzip
import io
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, cast

from thinpipe.launch.host.cache import cache_folder

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Compression = Literal["gzip", "zstd"] | None
COMPRESSED = (".gz", ".gzip", ".zst", ".zstd")
_MAGIC: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)
_HEAD_NBYTES = 1 << 16
_BLOCK_NBYTES = 1 << 20


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
def opened(file: Path, packed: Compression) -> Iterator[IO[bytes]]:
    """The content of a file, to be read from its beginning.

    Raises:
        ValueError: it is damaged, or ends too early.
    """
    with file.open("rb") as raw:
        try:
            if packed is None:
                yield raw
            elif packed == "gzip":
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield cast(IO[bytes], stream)
            else:
                yield io.BufferedReader(_Zstd(raw), _BLOCK_NBYTES)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _damaged(file, str(error)) from error


class _Zstd(io.RawIOBase):
    """A zstd stream; its library's own reader takes one that is cut for one that is over."""

    def __init__(self, raw: IO[bytes]) -> None:
        from zstandard import ZstdDecompressor

        self._raw, self._new = raw, ZstdDecompressor().decompressobj
        self._frame, self._left = self._new(), bytearray()
        self._packed, self._within = b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        from zstandard import ZstdError

        room = memoryview(buffer).cast("B")
        try:
            while not self._left and self._more():
                pass
        except ZstdError as error:
            raise EOFError(str(error)) from error
        count = min(len(room), len(self._left))
        room[:count] = self._left[:count]
        del self._left[:count]
        return count

    def _more(self) -> bool:
        """Unpack a part; False at the end."""
        part = self._packed or self._raw.read(_BLOCK_NBYTES)
        if not part:
            if self._within:
                raise EOFError("it ends within a frame")
            return False
        self._left += self._frame.decompress(part)
        self._packed, self._within = b"", not self._frame.eof
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, self._new()
        return True


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


def _damaged(file: Path, problem: str) -> ValueError:
    return ValueError(f"{file}: its compressed data is damaged ({problem}); download it again")
