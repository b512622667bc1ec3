"""Memory that this machine has free, and how busy other processes keep its cores."""

import time

import psutil

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


def free_memory() -> int:
    """Bytes that this machine can allocate without swapping."""
    available: int = psutil.virtual_memory().available
    return available


class BackgroundLoad:
    """Measures what other processes on this machine have computed since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores(self) -> float:
        """How many cores other processes have kept busy on average."""
        wall_s, busy_s, own_s = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, busy_s - own_s) / wall_s

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        busy_s = sum(getattr(times, kind, 0.0) for kind in _BUSY)
        return time.perf_counter(), busy_s, time.process_time()
