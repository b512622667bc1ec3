"""Digests of files' content, remembered for large files that did not change."""

import contextlib
import json
import os
import time
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from thinpipe.launch.data.token_file import content_digest
from thinpipe.launch.host.cache import cache_folder

_REMEMBERED_NBYTES = 64 << 20
"""Smaller files are read faster than what is remembered of them is looked up and trusted."""
_SETTLED_S = 2.0
"""A file that was written less than so long ago may change again within its clock's resolution."""


def digest_of(file: Path) -> str:
    """A digest (hex) of a file's content: against accidents, not against an attacker."""
    before = file.stat()
    if before.st_size < _REMEMBERED_NBYTES:
        return content_digest(file)
    state = [before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino]
    name = xxh3_128_hexdigest(os.fsencode(file.resolve()))
    with contextlib.suppress(OSError, ValueError):
        saved, digest = json.loads((cache_folder() / "digests" / name).read_bytes())
        if saved == state:
            return str(digest)
    digest = content_digest(file)
    with contextlib.suppress(OSError):
        if time.time() - max(before.st_mtime, before.st_ctime) > _SETTLED_S:
            folder = cache_folder() / "digests"
            folder.mkdir(exist_ok=True)
            partial = folder / f"{name}.{os.getpid()}"
            partial.write_text(json.dumps([state, digest]), encoding="utf-8")
            partial.replace(folder / name)
    return digest
