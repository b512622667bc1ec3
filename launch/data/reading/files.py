"""Which files a path means, in an order that is the same on every machine."""

import glob
import os
import re
import sysconfig
from pathlib import Path

from thinpipe.pipeline.models.paths import user_path

# Tests, installed packages, and generated modules, which differ between machines with one Python.
_STDLIB_SKIPPED = re.compile(
    r"(tests?|idle_test|site-packages|dist-packages|__pycache__|config-.*)$|_sysconfigdata"
)


def find_files(path: str | None, setting: str) -> list[Path]:
    """Regular files of a `data.path` or the like, sorted.

    Without a path, those of Python's standard library.

    Raises:
        ValueError: no file is found.
    """
    if path == "":
        raise ValueError(f"{setting} = '': give a path, or leave it out")
    place = user_path(path or sysconfig.get_paths()["stdlib"])
    if path is None:
        files = _stdlib_files(place)
    elif place.is_dir():
        parts = {file: file.relative_to(place).parts for file in place.rglob("*")}
        files = [file for file in parts if not any(part.startswith(".") for part in parts[file])]
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
        raise ValueError(
            f"{setting} = {path!r}: no such file or folder, seen from {Path.cwd()}; "
            f"{_path_remedy(path, setting)}"
        )
    files = sorted((file for file in files if file.is_file()), key=Path.as_posix)
    if not files:
        raise ValueError(
            f"{setting} = {path!r}: no files found; name a file or a folder with files"
        )
    return files


def _path_remedy(path: str, setting: str) -> str:
    if "$" in path:
        return "variables are not expanded; write the path out, or begin it with ~/"
    if not path.isprintable():  # "C:\text.txt" has a tab
        return "put a path with backslashes in single quotes"
    without = ", or leave it out for the standard library's sources"
    return f"correct the path{without if setting == 'data.path' else ''}"


def _stdlib_files(root: Path) -> list[Path]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _STDLIB_SKIPPED.match(name)]
        sources = (name for name in names if name.endswith(".py"))
        files += [Path(folder, name) for name in sources if not _STDLIB_SKIPPED.match(name)]
    return files
