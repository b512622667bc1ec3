"""glibc's malloc, where blocks of a stage come and go.

Every rank keeps freed memory (`launch/net/ranks/elastic.py`): that is quicker. With shards it
grew with the number of blocks, by half of what shards save: blocks differ in size, and what malloc
keeps of one does not fit the next. So ranks with shards give it back.
"""

import ctypes

_M_MMAP_THRESHOLD, _NBYTES = -3, 1 << 20


def return_freed_memory() -> None:
    """From now on, whatever takes a megabyte or more is mapped, and unmapped when it is freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _NBYTES)
