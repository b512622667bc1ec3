"""Paths that a user wrote."""

from os import PathLike
from pathlib import Path


def user_path(written: str | PathLike[str]) -> Path:
    """A path with `~` and `~name` replaced by the folder they stand for.

    Raises:
        ValueError: there is no such folder, such as in a container whose user has no name.
    """
    try:
        return Path(written).expanduser()
    except RuntimeError:
        problem = f"{written}: the home folder of {Path(written).parts[0]} is not known"
        raise ValueError(f"{problem}; write the path in full, or set HOME") from None
