"""What glibc's malloc does with freed memory: ranks keep it, but with shards or codes."""

import ctypes
import os

_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX")
_TUNABLES = tuple(
    f"glibc.malloc.{name}" for name in ("mmap_threshold", "trim_threshold", "arena_max")
)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # M_TRIM_THRESHOLD, ... of malloc.h
_KEPT_NBYTES, _RETURNED_NBYTES = 1 << 30, 1 << 20  # the functions below say what each is for


def keep_freed_memory() -> bool:
    """Have this process reuse freed memory, up to 1 GiB, instead of returning it.

    By default glibc maps every tensor above 32 MB separately, and the kernel clears it page by
    page: a step took 1.26 times as long (benchmarks/results/kernels_xeon_202611.md). All threads
    share one arena: what those of an exchange free is used by the next backward pass, which takes
    a third off a replica's peak. Call before the first large allocation, and in one thread. Returns
    False without any change if the user has set one of them, or the C library lacks these settings.
    """
    limits = {_MMAP_THRESHOLD: _KEPT_NBYTES, _TRIM_THRESHOLD: _KEPT_NBYTES, _ARENA_MAX: 1}
    return all(_set(*limit) for limit in limits.items())


def return_freed_memory() -> bool:
    """From now on, whatever takes a megabyte or more is mapped, and unmapped when it is freed.

    Blocks of a stage come and go with shards, and differ in size: what malloc keeps of one does not
    fit the next. Kept memory grew with the number of blocks, by half of what shards save. So do
    values that are read from codes: in nf4 a Llama-7B's shape took three times its memory
    (benchmarks/results/small_weights_cpu_202611.md). What the user has set stays:
    then it returns False.
    """
    return _set(_MMAP_THRESHOLD, _RETURNED_NBYTES)


def _set(parameter: int, value: int) -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in _VARIABLES) or any(n in tunables for n in _TUNABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(parameter, value))
