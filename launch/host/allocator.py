"""What glibc's malloc does with freed memory: ranks keep it, but with shards or codes."""

import ctypes
import os

_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_KEPT_NBYTES, _RETURNED_NBYTES = 1 << 30, 1 << 20  # the functions below say what each is for


def keep_freed_memory() -> bool:
    """Have this process reuse freed memory, up to 1 GiB, instead of returning it.

    By default glibc maps every tensor above 32 MB separately, and the kernel clears it page by
    page: a step took 1.26 times as long (benchmarks/results/kernels_xeon_202611.md). Call before
    the first large allocation. Returns False without any change if the user has set malloc's
    thresholds, or the C library lacks these settings.
    """
    return _set(_MMAP_THRESHOLD, _KEPT_NBYTES) and _set(_TRIM_THRESHOLD, _KEPT_NBYTES)


def return_freed_memory() -> bool:
    """From now on, whatever takes a megabyte or more is mapped, and unmapped when it is freed.

    Blocks of a stage come and go with shards, and differ in size: what malloc keeps of one does not
    fit the next. Kept memory grew with the number of blocks, by half of what shards save. So do
    values that are read from codes: in nf4 a Llama-7B's shape took three times its memory
    (benchmarks/results/small_weights_cpu_202611.md). What the user has set stays:
    then it returns False.
    """
    return _set(_MMAP_THRESHOLD, _RETURNED_NBYTES)


def _set(threshold: int, nbytes: int) -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or any(n in tunables for n in _TUNABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(threshold, nbytes))
