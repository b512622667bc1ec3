"""Compiling kernels with numba, and keeping the machine code on disk.

A cache is never a reason to fail: what is damaged there is compiled again and replaced, and where
nothing can be kept, code is compiled in memory.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import llvmlite
import numba
from numba import njit
from numba.core.caching import NullCache, dumps
from numba.core.compiler import CompileResult

from thinpipe.pipeline.wire.kernels.cpu import kept

_FOLDER = Path(__file__).parents[4]
_ROOM_DEPTH = 4
"""Names to a room of kernels: thinpipe.pipeline.wire.kernels, thinpipe.launch.plan.placement."""
_VERSIONS = (numba.__version__, llvmlite.__version__, sys.version)
_DIGEST_NBYTES = 32  # SHA-256
_LONGEST_WAIT_S = 60.0
"""For a kernel that another process compiles; then it is compiled here too."""


class KernelCache(NullCache):  # type: ignore[misc]  # numba has no type hints
    """A file per compiled variant of a function, behind its SHA-256.

    numba's own cache fails at every start where its files are damaged or cannot be written.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
        self._locks: dict[str, IO[bytes]] = {}

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The variant for these types, if it is in one of the folders and whole.

        If it is not, this process gets the lock to compile it, once no other process has it.
        """
        target.refresh()
        name = self._file_name(signature, target.codegen())
        if (found := self._read(name, target)) is None:
            self._lock(name)
            if (found := self._read(name, target)) is not None:  # compiled meanwhile
                self._unlock(name)
        return found

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep a variant in the first folder that takes it."""
        name = self._file_name(signature, compiled.codegen)
        try:
            _keep(name, dumps(compiled._reduce()))
        finally:
            self._unlock(name)

    def unlock(self) -> None:
        """Nothing is being compiled any more: others need not wait for it."""
        for name in [*self._locks]:
            self._unlock(name)

    def _read(self, name: str, target: Any) -> Any:
        for folder in kept.cache_folders():
            with contextlib.suppress(OSError):
                content = (folder / name).read_bytes()
                digest, code = content[:_DIGEST_NBYTES], content[_DIGEST_NBYTES:]
                if digest == hashlib.sha256(code).digest():  # first: pickle runs what it reads
                    return CompileResult._rebuild(target, *pickle.loads(code))
        return None

    def _lock(self, name: str) -> None:
        """Wait until no other process compiles this; go on without a lock where there are none."""
        for folder in kept.cache_folders():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                # one process compiles, the others wait: each would take seconds of the same cores
                lock = self._locks[name] = (folder / f"{name}.lock").open("wb")
            except OSError:
                continue
            deadline = time.monotonic() + _LONGEST_WAIT_S
            with contextlib.suppress(OSError):  # a file system without locks
                while time.monotonic() < deadline:
                    with contextlib.suppress(BlockingIOError):
                        return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    time.sleep(0.02)
            return

    def _unlock(self, name: str) -> None:
        """A lock's file may go while others wait for it: they find the code once they have it."""
        if (lock := self._locks.pop(name, None)) is not None:
            with lock, contextlib.suppress(OSError):
                os.unlink(lock.name)
                fcntl.flock(lock, fcntl.LOCK_UN)  # also where a fork has a copy of the file

    def _file_name(self, signature: Any, codegen: Any) -> str:
        key = repr((_VERSIONS, signature, codegen.magic_tuple()))
        return f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _keep(name: str, code: bytes) -> None:
    for folder in kept.cache_folders():
        partial = folder / f"{name}.{uuid4().hex}"  # other processes may write the same
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(partial, folder / name)  # readers see a whole file or none
            return
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use, without the GIL, and cache on disk.

    numba links cached code by qualified name. With a digest of all sources of its room in the name,
    code from other versions of them is never found.
    """
    function.__qualname__ = f"{function.__qualname__}_{source_digest(function.__module__)}"
    wrapped: Any = njit(nogil=True, error_model="numpy")(function)  # numpy's: no check of divisors
    wrapped._cache = cache = KernelCache(function)
    wrapped._compiler.compile = _then_unlocked(wrapped._compiler.compile, cache)
    return wrapped  # type: ignore[no-any-return]


def _then_unlocked(compile_variant: Callable[..., Any], cache: KernelCache) -> Callable[..., Any]:
    """The same for numba, which tells its cache nothing of code that cannot be compiled."""

    def compile_or_unlock(*args: Any) -> Any:
        try:
            return compile_variant(*args)
        except BaseException:
            cache.unlock()
            raise

    return compile_or_unlock


@functools.cache
def source_digest(module: str, folder: Path = _FOLDER) -> str:
    """Digest of all sources in a module's room, such as `kernels`: what it may be made of."""
    room = folder.joinpath(*module.split(".")[1:_ROOM_DEPTH])
    sources = b"".join(path.read_bytes() for path in sorted(room.rglob("*.py")))
    return hashlib.sha256(sources).hexdigest()[:12]
