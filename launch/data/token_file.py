"""Documents as token ids on disk: written once, piece by piece, and memory-mapped by every rank.

A folder holds flat arrays: `tokens` (uint8, uint16 or int32, as the ids need), `stops` and `rows`
(int64, of each document: the token after its last, and the row that it came from). Where they are
needed there are `counts` (bool, of each token: whether it is learnt), `types` (uint8, of each
token) and `targets` (float64, as many of each document). `manifest.json` comes last. It has their
sizes and digests, so a folder without it is unfinished, and one that does not fit it is damaged.
"""

import hashlib
import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from thinpipe.launch.data.documents import Column, Document, Rejected
from thinpipe.launch.data.reading.digests import digest_of
from thinpipe.launch.host import disk

_MANIFEST = "manifest.json"
_PROGRESS = "progress.json"
_VERSION = 2  # of the layout: files of another are made again
_TYPES: Mapping[str, npt.DTypeLike] = {"counts": bool, "types": np.uint8, "targets": np.float64}
_TRUSTED_S = 3600.0  # for so long a file that does not change is not compared with its digest again
_MAPPED_NBYTES, _AROUND_NBYTES = 32 << 20, 1 << 20
"""Of pages, before they are given back, and those that Linux maps around one that is read: without
this a rank's resident set became that of the whole file (2 GB: 1.5 GB after 6,400 reads)."""
_FLUSH_S = 5.0  # between what an interrupted process need not do again
_NAMED = 3  # rejected rows named for each reason


class DamagedError(ValueError):
    """A token file is not what was written; it has to be made again."""


def token_type(ids: int) -> np.dtype[Any]:
    """The smallest type that holds token ids below `ids`."""
    return np.dtype(np.uint8 if ids <= 1 << 8 else np.uint16 if ids <= 1 << 16 else np.int32)


class TokenFile:
    """The documents of a folder, mapped; see `Documents` for what callers use."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Use `open`, which checks them."""
        self.digest: str = manifest["digest"]
        self.rejected: Mapping[str, list[Any]] = manifest["rejected"]
        """By reason: how many rows, and where the first of them are."""
        self.remarks: Mapping[str, int] = manifest["remarks"]
        """What was done to rows to make documents of them, and to how many."""
        self.facts: Mapping[str, Any] = manifest["facts"]
        self._tokens = _Mapped(folder / "tokens", np.dtype(manifest["type"]))
        self._columns = {
            name: _Mapped(folder / name, np.dtype(_TYPES[name])) for name in manifest["columns"]
        }
        self._stops = _Mapped(folder / "stops", np.dtype(np.int64)).array
        self.rows: npt.NDArray[np.int64] = _Mapped(folder / "rows", np.dtype(np.int64)).array
        """The row of the source that each document came from, ascending."""

    @classmethod
    def open(cls, folder: Path) -> "TokenFile":
        """Map a finished folder; a process of the host has looked at every byte of it.

        Raises:
            FileNotFoundError: it is not there, or not finished.
            DamagedError: it is not what was written.
        """
        try:
            manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
            if manifest["version"] != _VERSION:
                raise DamagedError(f"{folder}: of version {manifest['version']}")
            for name, (nbytes, digest) in manifest["files"].items():
                place = folder / name
                if place.stat().st_size != nbytes or digest_of(place, _TRUSTED_S) != digest:
                    raise DamagedError(f"{place}: not what was written")
            return cls(folder, manifest)
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DamagedError(f"{folder / _MANIFEST}: cannot be read ({error})") from None

    def __len__(self) -> int:
        return len(self._stops)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self._stops, prepend=0)

    @property
    def size(self) -> int:
        return len(self._tokens.array)

    def read(self, number: int, start: int = 0, stop: int | None = None) -> Document:
        """Read one, or some of its tokens.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        first = 0 if number == 0 else int(self._stops[number - 1])
        last = int(self._stops[number]) if stop is None else first + stop
        found = self.span(first + start, last)
        if "targets" not in self._columns:
            return found
        targets = self._columns["targets"]
        each = len(targets.array) // len(self)
        return replace(found, targets=targets.read(number * each, (number + 1) * each))

    def span(self, start: int, stop: int) -> Document:
        """Read tokens by their place in the file, across documents."""
        tokens = self._tokens.read(start, stop).astype(np.int32)
        columns = {name: column for name, column in self._columns.items() if name != "targets"}
        own: dict[str, Any] = {name: column.read(start, stop) for name, column in columns.items()}
        return Document(tokens, **own)


class TokenWriter:
    """Writes a folder, document by document; what was flushed survives an interruption."""

    def __init__(self, folder: Path, *, ids: int, columns: Sequence[Column] = ()) -> None:
        """Go on with what the folder holds; `done` says how far that is.

        `columns` are what all documents have besides tokens.
        """
        self.folder, self._type, self._columns = folder, token_type(ids), {*columns}
        folder.mkdir(parents=True, exist_ok=True)
        saved = _progress(folder)
        self.done: Any = saved["done"]
        """What the last `flush` was given; None at the start."""
        self.rejected: dict[str, list[Any]] = saved["rejected"]
        self.remarks: dict[str, int] = saved["remarks"]
        self._files = {
            name: _reopened(folder / name, saved["sizes"].get(name, 0))
            for name in ("tokens", "stops", "rows", *columns)
        }
        self._flushed_s = time.monotonic()

    def add(self, document: Document, row: int) -> None:
        """Append a document that was made of the source's row `row`."""
        self.extend(document)
        if document.remark is not None:
            self.remarks[document.remark] = self.remarks.get(document.remark, 0) + 1
        if document.targets is not None:
            self._files["targets"].write(document.targets.astype(np.float64).tobytes())
        stop = self._files["tokens"].tell() // self._type.itemsize
        self._files["stops"].write(np.int64(stop).tobytes())
        self._files["rows"].write(np.int64(row).tobytes())

    def extend(self, part: Document) -> None:
        """Append a part of a document that is too long for one piece; `add` takes its last."""
        given = {name for name in _TYPES if getattr(part, name) is not None}
        if given != self._columns:
            raise ValueError(f"a document has {sorted(given)}, and others {sorted(self._columns)}")
        self._files["tokens"].write(part.tokens.astype(self._type).tobytes())
        for name in given - {"targets"}:
            self._files[name].write(getattr(part, name).astype(_TYPES[name]).tobytes())

    def reject(self, rejected: Rejected) -> None:
        found = self.rejected.setdefault(rejected.reason, [0, []])
        found[0] += 1
        if len(found[1]) < _NAMED:
            found[1].append(rejected.where)

    def flush(self, done: Any) -> None:
        """Have all that was added on disk; `done` (JSON) says what it was made of."""
        self._flush_files()
        sizes = {name: file.tell() for name, file in self._files.items()}
        saved = {"done": done, "sizes": sizes, "rejected": self.rejected, "remarks": self.remarks}
        _write_json(self.folder / _PROGRESS, saved)

    def passed(self, done: Any) -> None:
        """As `flush`, if that was seconds ago: it waits for the disk."""
        if time.monotonic() - self._flushed_s > _FLUSH_S:
            self.flush(done)
            self._flushed_s = time.monotonic()

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Close the folder's files and write its manifest, with `facts` of the caller's own."""
        self._flush_files()
        self.close()
        paths = {name: self.folder / name for name in self._files}
        files = {name: (path.stat().st_size, digest_of(path)) for name, path in paths.items()}
        manifest = {
            "version": _VERSION,
            "type": self._type.name,
            "columns": sorted(self._columns),
            "files": files,
            "digest": hashlib.sha256(json.dumps([self._type.name, files]).encode()).hexdigest(),
            "rejected": self.rejected,
            "remarks": self.remarks,
            "facts": facts,
        }
        _write_json(self.folder / _MANIFEST, manifest)
        (self.folder / _PROGRESS).unlink(missing_ok=True)
        disk.flush_folder(self.folder)

    def _flush_files(self) -> None:
        for file in self._files.values():
            file.flush()
            disk.flush(file.fileno())

    def close(self) -> None:
        """Close the files; without `finish`, what was flushed stays."""
        for file in self._files.values():
            file.close()


class _Mapped:
    """A mapped array, whose pages are given back to the system now and then."""

    def __init__(self, path: Path, kind: np.dtype[Any]) -> None:
        self._map: mmap.mmap | None = None
        self._read = 0
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.array: npt.NDArray[Any] = np.frombuffer(self._map or b"", dtype=kind)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        part = self.array[start:stop].copy()
        self._read += part.nbytes + _AROUND_NBYTES
        if self._map is not None and self._read > _MAPPED_NBYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._read = 0
        return part


def rejections(file: TokenFile) -> list[str]:
    """What was not trained on as it is, a line for each reason."""
    lines = []
    for reason, (count, named) in file.rejected.items():
        more = " and others" if count > len(named) else ""
        rows = "row is" if count == 1 else "rows are"
        lines.append(f"{count} {rows} left out: {reason} ({', '.join(named)}{more})")
    return lines + [f"{remark}: {count}" for remark, count in file.remarks.items()]


def _progress(folder: Path) -> dict[str, Any]:
    try:
        saved = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
        whole = all((folder / name).stat().st_size >= n for name, n in saved["sizes"].items())
    except (OSError, ValueError, KeyError):
        whole = False
    return saved if whole else {"done": None, "sizes": {}, "rejected": {}, "remarks": {}}


def _reopened(path: Path, nbytes: int) -> IO[bytes]:
    file = path.open("ab")
    file.truncate(nbytes)
    file.seek(0, os.SEEK_END)
    return file


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    disk.replace(partial, path)
