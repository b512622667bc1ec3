"""Where kernels' machine code is kept on disk, known without numba, which takes long to import."""

import os
from pathlib import Path
from tempfile import TemporaryFile

_ROOM_NBYTES = 2**20
"""Of a kernel's code, 30 to 400 kB."""


def cache_folders() -> list[Path]:
    """Where code is kept: NUMBA_CACHE_DIR if that is set, the user's cache folder, next to ours.

    One for all checkouts: the names of kernels carry a digest of their sources.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    user = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    return [
        *([Path(chosen)] if chosen else []),
        *[user / "thinpipe" / "kernels"] * user.is_absolute(),
        Path(__file__).parent / "__pycache__",
    ]


def why_nothing_is_kept() -> str | None:
    """Why no folder takes compiled code; None if one does."""
    problems = []
    for folder in cache_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder, buffering=0) as file:
                if file.write(bytes(_ROOM_NBYTES)) == _ROOM_NBYTES:
                    return None
            problems.append(f"{folder}: too little space")
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    return "; ".join(problems)
