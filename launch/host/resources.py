"""Memory that this machine has free, and how busy its cores have been."""

import psutil

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


def free_memory() -> int:
    """Bytes that this machine can allocate without swapping."""
    available: int = psutil.virtual_memory().available
    return available


def busy_s() -> float:
    """Core seconds that this machine has been busy since it was started."""
    times = psutil.cpu_times()
    return sum(getattr(times, kind, 0.0) for kind in _BUSY)
