"""What is freed goes back to the system, so that one block at a time is one block of memory.

glibc keeps freed tensors of up to 32 MB for later ones, and those of another size do not fit: with
blocks that come and go a rank grew with the number of its blocks, by half of what shards save.
"""

import ctypes

_M_MMAP_THRESHOLD, _NBYTES = -3, 1 << 20


def return_freed_memory() -> None:
    """From now on, whatever takes a megabyte or more is mapped, and unmapped when it is freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _NBYTES)
