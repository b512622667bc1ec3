"""Compiling kernels with numba, and keeping the machine code on disk."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.caching import UserWideCacheLocator
from numba.misc.appdirs import AppDirs

_PACKAGE = "thinpipe.pipeline.wire.kernels"
_FOLDER = Path(__file__).parents[1]
_IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+)(?: import (?:\(([\w\s,]*)\)|([\w ,]*)))?", re.M)


class KernelCache(UserWideCacheLocator):  # type: ignore[misc]  # numba has no type hints
    """Keeps compiled kernels in the user's cache folder, one for all checkouts and environments.

    The names of kernels carry a digest of their sources, so code from another version is never
    found there.
    """

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        """`path` is the file of `function`."""
        super().__init__(function, path)
        self._cache_path = str(Path(AppDirs("thinpipe", False).user_cache_dir) / "kernels")
        self._digest = source_digest(function.__module__)

    def get_source_stamp(self) -> str:
        """What cached code must have been compiled from."""
        return self._digest


_PLACES = f"UserProvidedCacheLocator,{__name__}.KernelCache,InTreeCacheLocator"
"""Where code is cached: in NUMBA_CACHE_DIR if that is set, else the first that can be written."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use, without the GIL, and cache on disk.

    numba finds cached code by file and qualified name. With a digest of all that the file imports
    in the name, an edit of a kernel discards only what depends on it.
    """
    function.__qualname__ = f"{function.__qualname__}_{source_digest(function.__module__)}"
    chosen, config.CACHE_LOCATOR_CLASSES = config.CACHE_LOCATOR_CLASSES, _PLACES
    try:
        wrapped: Callable[..., Any] = njit(nogil=True, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_LOCATOR_CLASSES = chosen
    return wrapped


@functools.cache
def source_digest(module: str, folder: Path = _FOLDER) -> str:
    """Digest of a kernel module's source and of those of the kernel modules that it imports."""
    found, left = dict[str, str](), [module]
    while left:
        path = _path(name := left.pop(), folder)
        if path is not None and name not in found:
            found[name] = path.read_text(encoding="utf-8")
            left += _imported(found[name])
    sources = "".join(found[name] for name in sorted(found))
    return hashlib.sha256(sources.encode()).hexdigest()[:12]


def _path(module: str, folder: Path) -> Path | None:
    """The file of a kernel module, None if the name is that of something else."""
    if module != _PACKAGE and not module.startswith(f"{_PACKAGE}."):
        return None
    stem = folder.joinpath(*module.removeprefix(_PACKAGE).split("."))
    return next((p for p in (stem.with_suffix(".py"), stem / "__init__.py") if p.is_file()), None)


def _imported(source: str) -> Iterator[str]:
    """Names that may be those of modules; `from a import b` may import either of a and a.b."""
    for module, several, one in _IMPORT.findall(source):
        yield module
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", several or one))
