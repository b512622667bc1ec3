"""Running text from files: which files, in which order, and which part is held out."""

import codecs
import glob
import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_PART = 1 << 20
HELD_OUT = 10  # one in this many files, or the last of this many equal parts of the text
# Tests, installed packages, and generated modules, which differ between machines with one Python.
_STDLIB_SKIPPED = re.compile(
    r"(tests?|idle_test|site-packages|dist-packages|__pycache__|config-.*)$|_sysconfigdata"
)


def find_files(path: str | None, setting: str) -> list[Path]:
    """Regular files of a `data.path` or the like, in an order that is the same on every machine.

    Without a path, those of Python's standard library.

    Raises:
        ValueError: no file is found.
    """
    place = Path(path or sysconfig.get_paths()["stdlib"]).expanduser()
    if path is None:
        files = _stdlib_files(place)
    elif place.is_dir():
        files = [file for file in place.rglob("*") if not _hidden(file.relative_to(place))]
    elif place.is_file():
        files = [place]
    elif glob.has_magic(path):
        files = [Path(name) for name in glob.glob(str(place), recursive=True)]
    elif "://" in path:
        raise ValueError(f"{setting} = {path!r}: URLs are not supported; download the file first")
    elif place.is_symlink():
        raise ValueError(
            f"{setting} = {path!r}: a link to {place.readlink()}, which does not exist; correct it"
        )
    elif place.exists():
        raise ValueError(f"{setting} = {path!r}: a device or a pipe; name a file or a folder")
    else:
        without = ", or leave it out for the standard library's sources"
        raise ValueError(
            f"{setting} = {path!r}: no such file or folder, seen from {Path.cwd()}; "
            f"correct the path{without if setting == 'data.path' else ''}"
        )
    files = sorted((file for file in files if file.is_file()), key=Path.as_posix)
    if not files:
        raise ValueError(
            f"{setting} = {path!r}: no files found; name a file or a folder with files"
        )
    return files


def _stdlib_files(root: Path) -> list[Path]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _STDLIB_SKIPPED.match(name)]
        sources = (name for name in names if name.endswith(".py"))
        files += [Path(folder, name) for name in sources if not _STDLIB_SKIPPED.match(name)]
    return files


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def take(documents: Iterable[bytes], limit: int | None) -> list[bytes]:
    """Take documents in order until `limit` bytes, the last one cut short."""
    if limit is None:
        return list(documents)
    kept: list[bytes] = []
    for document in documents:
        kept.append(document[:limit])
        limit -= len(kept[-1])
        if limit == 0:
            break
    return kept


def split(documents: list[bytes]) -> tuple[bytes, bytes]:
    """Divide into training and held-out text, independent of how many sequences are taken.

    Held out is every tenth document, spread over the whole text; or, when these are not close to
    a tenth of the bytes, the last tenth of the joined text.
    """
    total = sum(map(len, documents))
    held_out = b"".join(documents[HELD_OUT - 1 :: HELD_OUT])
    if total / (2 * HELD_OUT) <= len(held_out) <= 2 * total / HELD_OUT:
        rest = [text for i, text in enumerate(documents) if i % HELD_OUT != HELD_OUT - 1]
        return b"".join(rest), held_out
    text = b"".join(documents)
    end = len(text) - len(text) // HELD_OUT
    return text[:end], text[end:]


def first_character(text: bytes) -> int:
    """Where the first whole character of UTF-8 begins."""
    return next((i for i, byte in enumerate(text[:4]) if byte & 0xC0 != 0x80), 0)


def is_utf8(text: bytes) -> bool:
    """Whether a text is UTF-8, apart from a character that was cut at either end.

    It is decoded in parts: as one string it may take four times its bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for place in range(first_character(text), len(text), _PART):
            decoder.decode(text[place : place + _PART])
    except UnicodeDecodeError:
        return False
    return True


def line(text: str) -> bytes:
    """Return a text as one line."""
    return (text if text.endswith("\n") else text + "\n").encode()
