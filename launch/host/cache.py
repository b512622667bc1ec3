"""Where a user's cache lies: what can be made again from the user's files."""

import os
import tempfile
from pathlib import Path

from thinpipe.pipeline.models.paths import user_path

CACHE = "THINPIPE_CACHE"
"""Environment variable that names another place for it."""


def cache_folder() -> Path:
    """A folder of this user's own that can be written; the same for all processes of a host.

    It is THINPIPE_CACHE if that is set, else the user's cache folder, else one for temporary files.

    Raises:
        OSError: none can be written.
        ValueError: THINPIPE_CACHE is in a home that is not known.
    """
    if chosen := os.environ.get(CACHE):
        folder = user_path(chosen).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    # not Path.expanduser, which raises where a user has neither HOME nor a name
    user = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    temporary = (os.environ.get("TMPDIR") or "/tmp", "/dev/shm")  # not that of one launcher
    names = [Path(place) / f"thinpipe-{os.getuid()}" for place in temporary]
    places = [*[user / "thinpipe"] * user.is_absolute(), *names]
    problems = []
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if place.lstat().st_uid != os.getuid():  # of a link too: it leads where its owner likes
                raise PermissionError(f"{place} belongs to somebody else")
            with tempfile.TemporaryFile(dir=place):
                return place
        except OSError as error:
            problems.append(error)
    raise problems[0]
