"""Digests of files' content, remembered for large files that did not change."""

import hashlib
import json
import math
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from xxhash import xxh3_128, xxh3_128_hexdigest

from thinpipe.launch.host import disk
from thinpipe.launch.host.cache import cache_folder

_REMEMBERED_NBYTES = 64 << 20
"""Smaller files are read faster than what is remembered of them is looked up and trusted."""
_LONGEST_WAIT_S = 300.0  # for another process that reads the same file: 300 GB at 1 GB/s
_SETTLED_S = 2.0
"""A file that was written less than so long ago may change again within its clock's resolution."""


def digest_of(file: Path, trusted_s: float = math.inf) -> str:
    """A digest (hex) of a file's content: against accidents, not against an attacker.

    One process of a host reads a large file, at most every `trusted_s`; others wait for it.
    """
    before = file.stat()
    if before.st_size < _REMEMBERED_NBYTES:
        return _digest(file)
    state = [before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino]
    name = xxh3_128_hexdigest(os.fsencode(file.resolve()))
    with ExitStack() as stack:
        memory = place = None
        with suppress(OSError):  # where nothing can be written each reads for itself
            place = cache_folder() / "digests" / name
            place.parent.mkdir(exist_ok=True)
            memory = stack.enter_context(place.open("ab", buffering=0))
            _wait_for(memory)
        with suppress(OSError, ValueError, TypeError):  # TypeError: damaged
            saved, digest, at = json.loads(place.read_bytes() if place else b"")
            if saved == state and 0 <= time.time() - at < trusted_s:
                return str(digest)
        digest = _digest(file)
        settled = time.time() - max(before.st_mtime, before.st_ctime) > _SETTLED_S
        if memory is not None and settled:
            with suppress(OSError):
                memory.truncate(0)
                memory.write(json.dumps([state, digest, time.time()]).encode())
    return digest


def _wait_for(memory: IO[bytes]) -> None:
    """Until no other process reads the file, but not for ever: one may have been stopped."""
    until_s = time.monotonic() + _LONGEST_WAIT_S
    while time.monotonic() < until_s:
        with suppress(BlockingIOError):
            disk.lock(memory)
            return
        time.sleep(0.02)


def _digest(file: Path) -> str:
    """Several times as fast as SHA-256."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, xxh3_128).hexdigest()
