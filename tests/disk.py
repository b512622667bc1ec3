"""A disk without room."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(most: int = 4096) -> Iterator[None]:
    """No file of this process grows past so many bytes, its output included: hold it shortly.

    Compiled modules are not written meanwhile: Python keeps those that were cut off.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes
